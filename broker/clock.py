"""Clock, signals and ticking: the one module that waits.

Redis's time decides expiry, monotonic time decides trust, and the two never meet elsewhere. A stop
is an event that a signal sets; loops wait on it instead of sleeping, so that it is prompt.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable

import structlog

from broker.errors import Overloaded, StoreRefused, StoreUnavailable

log = structlog.get_logger()


def now_ms() -> int:
    """Monotonic milliseconds; only differences mean anything."""
    return time.monotonic_ns() // 1_000_000


class Stop:
    """Set once, by SIGTERM, SIGINT or hand; everything that runs looks at it."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def on_signals(self) -> Stop:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._event.set())
        return self

    def set(self) -> None:
        self._event.set()

    def __bool__(self) -> bool:
        return self._event.is_set()

    def wait_ms(self, milliseconds: float) -> bool:
        """Wait that long at most; True when the stop came."""
        return self._event.wait(milliseconds / 1000)


class Backoff:
    """Growing, jittered waits after failures in a row, and a say on which of them to log."""

    def __init__(self, *, first_ms: int = 50, most_ms: int = 2_000) -> None:
        self._first_ms, self._most_ms = first_ms, most_ms
        self.failures = 0

    def failed(self) -> float:
        """Milliseconds to wait now."""
        self.failures += 1
        wait = min(self._most_ms, self._first_ms << min(self.failures - 1, 10))
        return wait * random.uniform(0.5, 1.0)

    def worth_logging(self) -> bool:
        """The first failure, the second, the fourth, and so on: an outage is not a flood."""
        return self.failures & (self.failures - 1) == 0

    def succeeded(self) -> None:
        self.failures = 0


def keep_doing(name: str, step: Callable[[], bool], stop: Stop, *, every_ms: float) -> None:
    """Call `step` until the stop: again at once while it says there is more, else after every_ms.

    Redis being away, or refusing, is waited out; anything else ends the process.
    """
    backoff = Backoff()
    while not stop:
        try:
            more = step()
        except (StoreUnavailable, StoreRefused, Overloaded) as error:
            wait_ms = backoff.failed()
            if backoff.worth_logging():
                log.warning("waiting", loop=name, reason=str(error), failures=backoff.failures)
            stop.wait_ms(wait_ms)
            continue
        backoff.succeeded()
        if not more:
            stop.wait_ms(every_ms)
