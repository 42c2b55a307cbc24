"""The broker process: routes, recovers, promotes, plans. Correctness never depends on it alone.

    route     ingress ─► partitions          (shared between brokers by a consumer group)
    adopt     what a dead router left
    sweep     orphans of dead consumers
    promote   delayed retries that are due
    plan      routes for live consumers      (one broker at a time, by a lease)
    tidy      empty streams, counters

Each loop is a thread with one step to repeat; they share nothing but the store. When the broker is
away, consumers keep working on their last routes and steal when these run dry.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable

import structlog

from broker.clock import Stop, keep_doing
from broker.planner import Plan, make_plan
from broker.recovery import Recovery
from broker.router import Router
from broker.settings import Settings
from broker.store import Store

log = structlog.get_logger()

_PLAN_EVERY_MS = 500
_PROMOTE_EVERY_MS = 250
_TIDY_EVERY_MS = 30_000


class Planning:
    """Publishes routes while this broker holds the lease."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._lease_ms = settings.lease_ttl_ms
        self._name = uuid.uuid4().hex

    def step(self) -> bool:
        if not self._store.take_lease(self._name, self._lease_ms):
            return False
        current = Plan.decode(self._store.plan())
        working = [
            name for name, facts in self._store.consumers().items() if facts["state"] == "working"
        ]
        plan = make_plan(self._store.backlog().partitions, working, current)
        if plan != current:
            self._store.publish_plan(plan.encode())
            log.info("plan", version=plan.version, consumers=len(plan.routes))
        return False


def serve(settings: Settings, stop: Stop) -> None:
    """Run all loops until the stop. Raises GeometryMismatch, StoreRefused, StoreUnavailable."""
    store = Store(settings)
    store.pin_geometry()
    router, recovery = Router(store, settings), Recovery(store, settings)
    loops: list[tuple[str, Callable[[], bool], float]] = [
        ("route", router.step, 50),
        ("adopt", router_adopter(store, settings), settings.lease_ttl_ms),
        ("sweep", recovery.sweep, settings.sweep_ms),
        ("promote", recovery.promote, _PROMOTE_EVERY_MS),
        ("plan", Planning(store, settings).step, _PLAN_EVERY_MS),
        ("tidy", recovery.tidy, _TIDY_EVERY_MS),
    ]
    broken: list[BaseException] = []
    threads = [
        threading.Thread(
            target=_guarded, args=(broken, stop, name, step, every_ms), name=name, daemon=True
        )
        for name, step, every_ms in loops
    ]
    for thread in threads:
        thread.start()
    log.info("broker serves", redis=settings.redis_shown, namespace=settings.namespace)
    for thread in threads:
        thread.join()
    store.close()
    if broken:
        raise broken[0]


def router_adopter(store: Store, settings: Settings) -> Callable[[], bool]:
    """A router of its own for adopting, since a router is used by one thread."""
    return Router(store, settings).adopt


def _guarded(
    broken: list[BaseException], stop: Stop, name: str, step: Callable[[], bool], every_ms: float
) -> None:
    """One loop's last line of defence: a bug in one stops the process, loudly."""
    try:
        keep_doing(name, step, stop, every_ms=every_ms)
    except BaseException as error:
        broken.append(error)
        log.exception("loop broke", loop=name)
        stop.set()
