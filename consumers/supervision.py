"""The consumer's side of its engine host: spawn it, speak with it, notice that it died or hangs.

One thread (the consumer's main thread, which must also be the one that spawns: see broker.leash)
calls `poll`; nothing here blocks longer than the time given to it. Writes go through a buffer,
since a host that hangs does not read. A host is killed with its whole process group, because
engines start processes of their own.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from broker.leash import leashed
from consumers import frames
from consumers.engine import Capacity, Completion, EngineStats, Generation

_READ_BYTES = 1 << 20


class Ready(NamedTuple):
    capacity: Capacity


class Done(NamedTuple):
    completions: list[Completion]


class Released(NamedTuple):
    numbers: list[int]


class Failed(NamedTuple):
    """The engine cannot start, for a reason that trying again may not mend."""

    reason: str


class Died(NamedTuple):
    """The host process has ended, or was killed for making no progress."""

    reason: str


Event = Ready | Done | Released | Failed | Died


class EngineHost:
    """One host process. After `Died` or `Failed` it is finished; spawn another."""

    def __init__(self, engine: str, options: dict[str, Any], *, stall_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self.stats = EngineStats(0, 0, 0, 0.0, 0, 0, 0)
        self.in_flight: set[int] = set()
        self._progressed = time.monotonic()
        self._out = bytearray(frames.encode(frames.START, engine, options))
        self._decoder = frames.Decoder()
        self._over = False
        self._link, self._process = _spawn()

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._link.fileno()

    def submit(self, generations: Sequence[Generation]) -> None:
        if not self.in_flight:
            self._progressed = time.monotonic()  # idle until now: the watch begins here
        self.in_flight.update(generation.number for generation in generations)
        self._out += frames.encode(frames.SUBMIT, generations)
        self._flush()

    def abort(self, numbers: Sequence[int]) -> None:
        self._out += frames.encode(frames.ABORT, list(numbers))
        self._flush()

    def release(self) -> None:
        """Ask for what has not started; the answer comes as `Released`."""
        self._out += frames.encode(frames.RELEASE)
        self._flush()

    def poll(self, timeout_s: float) -> list[Event]:
        """What happened, waiting at most timeout_s for the first of it."""
        if self._over:
            return []
        writing = [self._link] if self._out else []
        readable, writable, _ = select.select([self._link], writing, [], timeout_s)
        if writable:
            self._flush()
        events = self._receive() if readable else []
        if not self._over and self.in_flight and self._stalled():
            self.kill()
            events.append(Died(f"no progress for {self._stall_timeout_s:g} s"))
        return events

    def _stalled(self) -> bool:
        return time.monotonic() - self._progressed > self._stall_timeout_s

    def _receive(self) -> list[Event]:
        try:
            data = self._link.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self._wait(1.0)  # the socket may end a moment before the process does
            self.kill()
            return [Died(_ending(self._process.returncode))]
        events: list[Event] = []
        for kind, *parts in self._decoder.feed(data):
            event = self._understand(kind, parts)
            if event is not None:
                events.append(event)
        return events

    def _understand(self, kind: int, parts: list[Any]) -> Event | None:
        if kind == frames.DONE:
            self._progressed = time.monotonic()
            completions = [Completion(*fields) for fields in parts[0]]
            self.in_flight.difference_update(done.number for done in completions)
            return Done(completions)
        if kind == frames.STATS:
            stats = EngineStats(*parts[0])
            if stats.steps != self.stats.steps:
                self._progressed = time.monotonic()
            self.stats = stats
            return None
        if kind == frames.READY:
            return Ready(Capacity(*parts[0]))
        if kind == frames.RELEASED:
            self.in_flight.difference_update(parts[0])
            return Released(parts[0])
        assert kind == frames.FAILED, f"unknown frame {kind}"
        self.kill()
        return Failed(parts[0])

    def _flush(self) -> None:
        try:
            while self._out:
                sent = self._link.send(self._out[:_READ_BYTES])
                del self._out[:sent]
        except BlockingIOError:
            return
        except OSError:
            self._out.clear()  # it died; the next poll says so

    def close(self, timeout_s: float) -> None:
        """Ask the host to end, then see to it."""
        if self._over:
            return
        self._out += frames.encode(frames.CLOSE)
        self._flush()
        self._wait(timeout_s)
        self.kill()

    def _wait(self, timeout_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def kill(self) -> None:
        """End the whole process group now. Safe to repeat."""
        if self._over:
            return
        self._over = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._link.close()


def _spawn() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair()
    with theirs:
        argv = leashed([sys.executable, "-m", "consumers.host", str(theirs.fileno())])
        process = subprocess.Popen(
            argv, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
    ours.setblocking(False)
    return ours, process


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the engine host was ended by {signal.Signals(-code).name}"
    return f"the engine host ended with exit code {code}"
