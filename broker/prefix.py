"""The prefix cutter: how much of a prompt names the prefix that it shares with others.

    |<- system prompt, everybody's ->|<- few-shot header or document, a group's ->|<- own part ->|
                                     cut here: the first place where traffic divides

A task walks the cut points 256, 512, 1k, … 64k bytes of its body and stops at the first whose
prefix carries less than `share_max` of the job's traffic. Prefixes above the share are *heavy*;
the small set of their hashes is the job's `Cut`, published with the job so that all submitters and
routers agree. Shallow and stable beats deep: a key that grows with a conversation would scatter
its turns.

The body is UTF-8 text, or token ids as little-endian 32-bit integers, so that a cut of 256 bytes is
64 tokens there. Heavy prefixes are found in one pass and bounded memory (Misra-Gries counters: with
n of them a share is underestimated by at most 1/n). Pure.

Not chosen: one fixed depth (no depth fits all traffic: the whole Mooncake trace shares its first
512 tokens), and exact counts (10^8 distinct prompts would be 10^8 counters).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from broker.task import Task

CUT_POINTS = tuple(256 << power for power in range(9))
_COUNTERS = 128  # per cut point: shares are known to within 1/128


def prompt_body(task: Task) -> bytes:
    """The bytes that prefixes are taken from. A chat is its turns, each ended by a zero byte."""
    prompt = task.get("prompt")
    if prompt is not None:
        return prompt.encode()
    ids = task.get("token_ids")
    if ids is not None:
        return struct.pack(f"<{len(ids)}I", *ids)
    return b"".join(f"{turn['role']}\n{turn['content']}\0".encode() for turn in task["messages"])


def _prefixes(body: bytes) -> Iterator[tuple[int, int]]:
    """(cut point, CRC-32 of the body up to there), shallowest first; the body's own end is last."""
    crc = start = 0
    for cut in CUT_POINTS:
        if len(body) <= cut:
            break
        crc = zlib.crc32(body[start:cut], crc)
        start = cut
        yield cut, crc
    else:
        return
    yield len(body), zlib.crc32(body[start:], crc)


class Cut(NamedTuple):
    """The heavy prefixes of a job as (cut point, CRC-32); all else is cut before."""

    heavy: frozenset[tuple[int, int]] = frozenset()

    def prefix(self, body: bytes) -> tuple[int, int]:
        """(length in bytes, CRC-32) of the prefix that names the group of this body."""
        length = crc = 0
        for length, crc in _prefixes(body):
            if (length, crc) not in self.heavy:
                break
        return length, crc

    def encode(self) -> str:
        return " ".join(f"{cut}:{crc}" for cut, crc in sorted(self.heavy))

    @classmethod
    def decode(cls, text: str) -> Cut:
        pairs = (pair.partition(":") for pair in text.split())
        return cls(frozenset((int(cut), int(crc)) for cut, _, crc in pairs))


class PrefixTraffic:
    """Watches the bodies of a job and knows which prefixes are heavy. Bounded memory."""

    def __init__(self, share_max: float) -> None:
        self._share_max = share_max
        self._total = 0
        self._counts: dict[int, dict[int, int]] = {cut: {} for cut in CUT_POINTS}

    def add(self, body: bytes) -> None:
        """Count one body. Deeper cuts are counted only where the shallower prefix is heavy."""
        self._total += 1
        for cut, crc in _prefixes(body):
            counts = self._counts.get(cut)
            if counts is None or not self._heavy(_count(counts, crc)):
                break

    def _heavy(self, count: int) -> bool:
        return count > self._share_max * self._total

    @property
    def total(self) -> int:
        return self._total

    def cut(self) -> Cut:
        """What was heavy so far; for fewer than two bodies nothing is."""
        if self._total < 2:
            return Cut()
        return Cut(
            frozenset(
                (cut, crc)
                for cut, counts in self._counts.items()
                for crc, count in counts.items()
                if self._heavy(count)
            )
        )


def _count(counts: dict[int, int], crc: int) -> int:
    """One Misra-Gries step: returns the lower bound of this prefix's count."""
    known = counts.get(crc)
    if known is not None or len(counts) < _COUNTERS:
        counts[crc] = (known or 0) + 1
        return counts[crc]
    for other in list(counts):
        counts[other] -= 1
        if not counts[other]:
            del counts[other]
    return 0
