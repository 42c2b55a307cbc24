"""Frames between a consumer and its engine host: four bytes of length, then one MessagePack array.

    consumer ─► host   [START, engine, options] [SUBMIT, [generation…]] [ABORT, [number…]]
                       [RELEASE] [CLOSE]
    host ─► consumer   [READY, capacity] [FAILED, text] [DONE, [completion…]] [STATS, stats]
                       [RELEASED, [number…]]

Both ends are ours and of one version, started by one another; a frame that does not parse is a bug.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgpack

START, SUBMIT, ABORT, RELEASE, CLOSE = 0, 1, 2, 3, 4
READY, FAILED, DONE, STATS, RELEASED = 10, 11, 12, 13, 14

_LENGTH = 4
FRAME_BYTES_MAX = 1 << 30


def encode(kind: int, *parts: Any) -> bytes:
    """One frame. Texts may hold half surrogates that an engine made; they are replaced."""
    body: bytes = msgpack.packb((kind, *parts), unicode_errors="replace")
    assert len(body) <= FRAME_BYTES_MAX, "a batch must be bounded before it becomes a frame"
    return len(body).to_bytes(_LENGTH, "big") + body


class Decoder:
    """Bytes in, whole frames out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[list[Any]]:
        """Frames completed by these bytes, as [kind, part…]."""
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= _LENGTH:
            length = int.from_bytes(self._buffer[start : start + _LENGTH], "big")
            assert length <= FRAME_BYTES_MAX, "the stream of frames is out of step"
            end = start + _LENGTH + length
            if len(self._buffer) < end:
                break
            yield msgpack.unpackb(bytes(self._buffer[start + _LENGTH : end]))
            start = end
        del self._buffer[:start]
