"""Recovery: what dead consumers held runs again, within a lease and a sweep, whatever the traffic.

A consumer is alive while its heartbeat key lives and names this incarnation; how long a task takes
plays no part. Every sweep looks at the roster, and only for a dead incarnation at the partitions.
Each orphan ends by the fence of the store, so two brokers may sweep at once and a consumer that was
only frozen finds its results superseded.
"""

from __future__ import annotations

import structlog

from broker.entries import DONE, Burial, Requeued
from broker.settings import Settings
from broker.settlement import open_entry, orphaned
from broker.store import Store

log = structlog.get_logger()

_BATCH = 200


class Recovery:
    """The sweeps that put things right."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._settings = settings
        self.requeued = self.buried = 0

    def sweep(self) -> bool:
        """Give every dead incarnation's entries back; False, so that the loop waits."""
        alive = {facts["incarnation"] for facts in self._store.consumers().values()}
        for incarnation in self._store.roster():
            if incarnation not in alive:
                self.recover(incarnation)
        return False

    def recover(self, incarnation: str) -> int:
        """Requeue or bury all that is pending for a dead incarnation, then forget its name."""
        partitions, moved = self._store.partitions(), 0
        for partition in partitions:
            while True:
                done = self._recover_batch(partition, incarnation)
                moved += done
                if done < _BATCH:
                    break
        left = self._store.forget(incarnation, partitions)
        log.info("recovered", incarnation=incarnation, entries=moved, partitions_left=left)
        return moved

    def _recover_batch(self, partition: str, incarnation: str) -> int:
        back: list[Requeued] = []
        entries = self._store.pending(partition, incarnation, _BATCH)
        for entry in entries:
            opened = open_entry(partition, entry, self._settings.limits)
            if not isinstance(opened, Burial):
                ending = orphaned(opened, crashes_max=self._settings.crashes_max)
                if isinstance(ending, Requeued):
                    back.append(ending)
                    continue
                opened = ending
            self.buried += self._store.bury(opened)
        self.requeued += self._store.requeue(partition, back).count(DONE)
        return len(entries)

    def promote(self) -> bool:
        """Bring back delayed tasks that are due; whether there may be more."""
        return self._store.promote(self._store.now_ms(), _BATCH) == _BATCH

    def tidy(self) -> bool:
        """Let go of empty streams and make the backlog counters true."""
        partitions = self._store.partitions()
        known = self._store.backlog().partitions
        mended = self._store.recount(sorted({*partitions, *known}))
        if mended:
            log.warning("backlog mended", fields=mended)
        idle = [partition for partition in partitions if partition not in known]
        for start in range(0, len(idle), _BATCH):
            self._store.reap(idle[start : start + _BATCH])
        return False
