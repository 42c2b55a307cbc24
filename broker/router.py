"""The router: what producers put into the ingress goes to its partition.

Any number of routers share the ingress through a consumer group. Deciding is pure (`address`); the
move is one fenced script, so a router that dies halfway leaves entries that another one takes over,
and a slow one loses the race harmlessly. What cannot be decoded is buried with its reason.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping

import structlog

from broker.entries import OTHER, Burial, NewEntry, RawEntry, RoutedEntry
from broker.errors import WireError
from broker.geometry import Geometry, prefix_crc
from broker.prefix import Cut, PrefixTraffic, prompt_body
from broker.settings import Settings
from broker.settlement import undecodable
from broker.store import Store
from broker.task import DEFAULT_JOB, Limits, Task
from broker.wire import Header, decode_entry, encode_packed

log = structlog.get_logger()

_BATCH = 256
_BLOCK_MS = 500
_FULL_WAIT_MS = 200
_LEARN_TASKS = 512  # a streaming job's cut is published once that many tasks were seen


def address(
    task: Task, geometry: Geometry, cut: Cut, tokens_per_byte: float, *, flat: bool = False,
    submitted_ms: int = 0,
) -> NewEntry:  # fmt: skip
    """Where a task goes. tokens_per_byte: the job's measured ratio, or the setting's guess."""
    body = prompt_body(task)
    if "prefix_key" in task:
        prefix = prefix_crc(task["prefix_key"].encode())
    else:
        _, prefix = cut.prefix(body)
    tokens = task.get("prompt_tokens") or _estimate(task, body, tokens_per_byte)
    header = Header(tokens, prefix, submitted_ms=submitted_ms, flat=flat)
    return NewEntry(
        geometry.partition(tokens, prefix), tokens, encode_packed(task), header.encode()
    )


def _estimate(task: Task, body: bytes, tokens_per_byte: float) -> int:
    ids = task.get("token_ids")
    return len(ids) if ids is not None else max(1, round(len(body) * tokens_per_byte))


class JobKnowledge:
    """What a router knows of a job: its published cut, or the traffic it is learning one from."""

    def __init__(self, cut: Cut | None, tokens_per_byte: float, share_max: float) -> None:
        self.cut = cut
        self.tokens_per_byte = tokens_per_byte
        self.traffic = PrefixTraffic(share_max)

    def learn(self, body: bytes) -> Cut | None:
        """Count one body; the cut to publish, once, when enough was seen."""
        if self.cut is not None:
            return None
        self.traffic.add(body)
        if self.traffic.total < _LEARN_TASKS:
            return None
        self.cut = self.traffic.cut()
        return self.cut


class Router:
    """One router of the ingress."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._settings = settings
        self._limits: Limits = settings.limits
        self._name = uuid.uuid4().hex[:12]
        self._jobs: dict[str, JobKnowledge] = {}
        self.routed = self.refused = self.duplicates = 0

    def step(self) -> bool:
        """Route one batch; whether it was a full one."""
        if self._store.backlog_tasks() >= self._settings.backlog_tasks_max:
            return False  # back-pressure: the ingress waits, and grows where producers can see it
        entries = self._store.ingress(self._name, _BATCH, _BLOCK_MS)
        self.route(entries)
        return bool(entries)

    def adopt(self) -> bool:
        """Take over what a dead router left."""
        entries = self._store.ingress_orphans(self._name, self._settings.lease_ttl_ms, _BATCH)
        self.route(entries)
        return len(entries) == _BATCH

    def route(self, entries: list[RawEntry]) -> None:
        """Move what can be decoded, bury the rest."""
        routed: list[RoutedEntry] = []
        burials: list[Burial] = []
        self._refresh()
        for entry in entries:
            sorted_out = self._sort(entry)
            if isinstance(sorted_out, Burial):
                burials.append(sorted_out)
            else:
                routed.append(sorted_out)
        codes = self._store.route(routed) if routed else []
        self.routed += len(codes)
        self.duplicates += codes.count(OTHER)
        for burial in burials:
            self.refused += self._store.bury(burial)
        if burials:
            log.warning("refused", entries=len(burials), first=_reason(burials[0].letter))

    def _sort(self, entry: RawEntry) -> RoutedEntry | Burial:
        entry_id, fields = entry
        try:
            if not fields:
                raise WireError("vanished", "the entry vanished before it was routed")
            task, flat = decode_entry(fields, self._limits)
        except WireError as error:
            return undecodable("", entry, error, self._limits)
        job = task.get("job", DEFAULT_JOB)
        known = self._knowledge(job)
        found = known.learn(prompt_body(task)) if "prefix_key" not in task else None
        if found is not None:
            self._store.open_job(job, {"cut": found.encode()})
        submitted_ms = int(entry_id.partition(b"-")[0])
        new = address(
            task, self._store.geometry, known.cut or known.traffic.cut(), known.tokens_per_byte,
            flat=flat, submitted_ms=submitted_ms,
        )  # fmt: skip
        return RoutedEntry(entry_id, job, task["id"], new)

    def _knowledge(self, job: str) -> JobKnowledge:
        known = self._jobs.get(job)
        if known is None:
            view = self._store.job(job)
            cut = None if view.cut is None else Cut.decode(view.cut)
            ratio = view.tokens_per_byte or self._settings.tokens_per_byte
            known = JobKnowledge(cut, ratio, self._settings.prefix_share_max)
            if len(self._jobs) >= 1000:
                self._jobs.pop(next(iter(self._jobs)))
            self._jobs[job] = known
        return known

    def _refresh(self) -> None:
        """Each batch asks one job, in turn, for its calibration, so that no job goes stale."""
        if not self._jobs:
            return
        job = next(iter(self._jobs))
        known = self._jobs.pop(job)
        self._jobs[job] = known
        view = self._store.job(job)
        known.tokens_per_byte = view.tokens_per_byte or known.tokens_per_byte
        if view.cut is not None:
            known.cut = Cut.decode(view.cut)


def _reason(letter: list[bytes]) -> str:
    facts: Mapping[bytes, bytes] = dict(zip(letter[::2], letter[1::2], strict=True))
    return facts[b"reason"].decode()[:200]
