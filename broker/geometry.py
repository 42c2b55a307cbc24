"""Where a task goes: buckets, slots, partitions, and every Redis key that tokenmq uses.

    prompt tokens ──► bucket  (edges 128, 256, … 65,536, and one above)
    prefix key    ──► slot    (CRC-32 mod slots)            partition = "<bucket>.<slot>"

The partition is a radix digit: draining one partition after the other hands an engine the tasks
that share a prefix together, while the prefix is hot. The geometry is pinned in Redis by the first
process; another one that is configured differently refuses to start, because two maps of the same
streams would split a prefix or lose sight of a backlog.

All keys of a shard carry its hash tag, so that a script never crosses a cluster slot. No other
module builds a key. Pure.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from typing import NamedTuple

BUCKET_EDGES = tuple(128 << power for power in range(10))
WIRE_VERSION = 1
ENGINES_GROUP = "engines"
ROUTERS_GROUP = "routers"


class Geometry(NamedTuple):
    """The pinned facts. Two processes with equal geometries compute equal partitions."""

    edges: tuple[int, ...] = BUCKET_EDGES  # inclusive upper bounds in prompt tokens
    slots: int = 256
    shards: int = 1
    version: int = WIRE_VERSION

    def bucket(self, tokens: int) -> int:
        """The bucket of a prompt of so many tokens: 0..len(edges)."""
        return bisect_left(self.edges, tokens)

    def slot(self, prefix_crc: int) -> int:
        """The slot of a prefix, given the CRC-32 (IEEE) of its prefix key."""
        return prefix_crc % self.slots

    def partition(self, tokens: int, prefix_crc: int) -> str:
        return f"{self.bucket(tokens)}.{self.slot(prefix_crc)}"

    def holds(self, partition: str) -> bool:
        """Whether this geometry has a partition of that name."""
        bucket, dot, slot = partition.partition(".")
        if len(partition) > 16 or not dot or not partition.isascii():
            return False  # before int(), which refuses thousands of digits with a ValueError
        if not (bucket.isdigit() and slot.isdigit()):
            return False
        return int(bucket) <= len(self.edges) and int(slot) < self.slots

    def upper_tokens(self, partition: str) -> int:
        """The most prompt tokens an entry of that partition is expected to have."""
        bucket = int(partition.partition(".")[0])
        return self.edges[bucket] if bucket < len(self.edges) else self.edges[-1] * 2

    def describe(self) -> str:
        edges = ",".join(map(str, self.edges))
        return f"version={self.version} shards={self.shards} slots={self.slots} edges={edges}"


def slot_major(partition: str) -> tuple[int, int]:
    """Sort key that keeps the buckets of a slot together: conversations grow across them."""
    bucket, _, slot = partition.partition(".")
    return int(slot), int(bucket)


def prefix_crc(prefix_key: bytes) -> int:
    """CRC-32 (IEEE 802.3), the one in every language's library."""
    return zlib.crc32(prefix_key)


class Keys:
    """The names of everything tokenmq keeps in Redis, for one namespace and shard."""

    def __init__(self, namespace: str = "tmq", shard: int = 0) -> None:
        self._shared = f"{namespace}:"
        self._tag = f"{{{shard}}}"
        self.ingress = self._of("ingress")
        self.backlog = self._of("backlog")
        self.delayed = self._of("delayed")
        self.dead = self._of("dead")
        self.seen = self._of("seen")  # ids that came through the ingress lately
        self.roster = self._of("roster")  # incarnations that may hold deliveries
        self.jobs = self._of("jobs")
        self.geometry = f"{namespace}:geometry"
        self.plan = f"{namespace}:plan"
        self.lease = f"{namespace}:lease"
        self._tasks = self._of("tasks")

    def _of(self, kind: str) -> str:
        return f"{self._shared}{kind}:{self._tag}"

    def tasks(self, partition: str) -> str:
        return f"{self._tasks}:{partition}"

    def tasks_pattern(self) -> str:
        """Glob of every partition stream of this shard."""
        return f"{self._tasks}:*"

    def partition_of(self, tasks_key: str) -> str:
        return tasks_key[len(self._tasks) + 1 :]

    def results(self, job: str) -> str:
        return f"{self._of('results')}:{job}"

    def job(self, job: str) -> str:
        return f"{self._of('job')}:{job}"

    def consumer(self, consumer: str) -> str:
        return f"{self._shared}consumer:{consumer}"

    def consumers_pattern(self) -> str:
        return f"{self._shared}consumer:*"
