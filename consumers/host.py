"""The engine host: the child process that owns an engine, so that its crash or hang is survivable.

It is a loop around `consumers.engine.Engine` and a socket to its consumer. It knows no Redis and no
task. When the consumer dies the socket ends and so does the host; a host that hangs is killed by
the consumer, or by the kernel (broker.leash) when the consumer is gone.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

from broker.errors import EngineUnavailable
from consumers import frames
from consumers.engine import Completion, Engine, Generation
from consumers.engines import make_engine

_STATS_EVERY_S = 0.2
_READ_BYTES = 1 << 18


class Host:
    """One engine and one socket."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._engine: Engine | None = None
        self._out = bytearray()
        self._completions: list[Completion] = []
        self._writing = asyncio.Event()
        self._closing = asyncio.Event()

    async def serve(self) -> None:
        """Until the consumer closes or disappears, or the engine dies."""
        loops = [asyncio.create_task(loop()) for loop in (self._receive, self._send, self._report)]
        closing = asyncio.create_task(self._closing.wait())
        done, _ = await asyncio.wait([*loops, closing], return_when=asyncio.FIRST_COMPLETED)
        for loop in done:
            loop.result()
        if self._engine is not None:
            await self._engine.close()

    async def _receive(self) -> None:
        events, decoder = asyncio.get_running_loop(), frames.Decoder()
        runs: list[asyncio.Task[None]] = []
        while data := await events.sock_recv(self._link, _READ_BYTES):
            for kind, *parts in decoder.feed(data):
                if kind == frames.START:
                    runs.append(asyncio.create_task(self._start(*parts)))
                else:
                    self._obey(kind, parts)
            # An engine that died raises here, at the latest with the next frame or report.
            for run in runs:
                if run.done():
                    run.result()
        self._closing.set()

    def _obey(self, kind: int, parts: list[Any]) -> None:
        if kind == frames.CLOSE:
            self._closing.set()
            return
        assert self._engine is not None, "the consumer waits for READY"
        if kind == frames.SUBMIT:
            self._engine.submit([Generation(*fields) for fields in parts[0]])
        elif kind == frames.ABORT:
            self._engine.abort(parts[0])
        elif kind == frames.RELEASE:
            self._write(frames.encode(frames.RELEASED, self._engine.release()))

    async def _start(self, name: str, options: dict[str, Any]) -> None:
        try:
            engine = make_engine(name, options)
            capacity = await engine.start(self._emit)
        except EngineUnavailable as error:
            self._write(frames.encode(frames.FAILED, str(error)))
            return
        self._engine = engine
        self._write(frames.encode(frames.READY, capacity))
        try:
            await engine.run()
        except EngineUnavailable as error:
            # Nothing can be trusted any more: say why and die; the consumer sees both.
            print(f"engine host: {error}", file=sys.stderr, flush=True)
            os._exit(70)

    def _emit(self, completions: Sequence[Completion]) -> None:
        self._completions += completions
        self._writing.set()

    def _write(self, frame: bytes) -> None:
        self._out += frame
        self._writing.set()

    async def _send(self) -> None:
        """Whatever was emitted since the last write goes out as one frame."""
        events = asyncio.get_running_loop()
        while True:
            await self._writing.wait()
            self._writing.clear()
            completions, self._completions = self._completions, []
            if completions:
                self._out += frames.encode(frames.DONE, completions)
            out, self._out = bytes(self._out), bytearray()
            await events.sock_sendall(self._link, out)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(_STATS_EVERY_S)
            if self._engine is not None:
                self._write(frames.encode(frames.STATS, self._engine.stats()))


def main(descriptor: int) -> None:
    """Serve on an inherited socket."""
    link = socket.socket(fileno=descriptor)
    link.setblocking(False)
    try:
        asyncio.run(Host(link).serve())
    except OSError:
        os._exit(71)  # the consumer is gone; nobody is left to tell


if __name__ == "__main__":
    main(int(sys.argv[1]))
