"""The feed: what to read next, and how much of it.

    route  3.17  4.17  3.52 │ 2.90 …      dwell: stay in one partition until it is dry
           ▲ here           └ then the next; when all are dry, steal from the end of the longest
                              other route

Room comes before work: tasks and tokens are bounded by what the engine can hold plus a little read
ahead, and an entry that cannot be started stays in the stream, where another card can have it. A
partition that answered with less than was asked for is *dry* until its backlog grows or a while has
passed (its remaining entries are pending elsewhere and may come back).

Pure: time is a number that the caller passes in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from broker.planner import Plan, weight

DRY_FOR_MS = 1_000


class Read(NamedTuple):
    """Ask this partition for up to `most` entries."""

    partition: str
    most: int


class Room(NamedTuple):
    """The bounds of what a consumer holds: tasks and tokens (prompt plus expected output)."""

    tasks: int
    tokens: int


class Feed:
    """One consumer's view of its route and of its budget."""

    def __init__(self, consumer: str, room: Room, *, read_max: int) -> None:
        self._consumer = consumer
        self._room = room
        self._read_max = read_max
        self._backlog: Mapping[str, tuple[int, int]] = {}
        self._order: list[str] = []
        self._dry: dict[str, tuple[int, int]] = {}  # partition -> (tasks seen then, until ms)
        self._dwelling: str | None = None
        self.tasks = 0
        self.tokens = 0

    # ------------------------------------------------------------ budget

    def take(self, tokens: int) -> None:
        self.tasks += 1
        self.tokens += tokens

    def give(self, tokens: int) -> None:
        self.tasks -= 1
        self.tokens -= tokens
        assert self.tasks >= 0 and self.tokens >= 0, "gave back more than was taken"

    def fits(self, cost_tokens: int) -> int:
        """How many more tasks of that cost fit; one at least when nothing is held."""
        by_tokens = (self._room.tokens - self.tokens) // max(1, cost_tokens)
        fitting = min(self._room.tasks - self.tasks, by_tokens, self._read_max)
        return max(fitting, 1 if self.tasks == 0 else 0)

    # ------------------------------------------------------------ route

    def look(self, backlog: Mapping[str, tuple[int, int]], plan: Plan) -> None:
        """Take in a fresh backlog and plan: own route first, then what others would do last."""
        self._backlog = backlog
        for partition, (seen, _) in list(self._dry.items()):
            if backlog.get(partition, (0, 0))[0] > seen:
                del self._dry[partition]
        own = [
            partition for partition in plan.routes.get(self._consumer, ()) if partition in backlog
        ]
        self._order = own + self._loot(plan, set(own))

    def _loot(self, plan: Plan, own: set[str]) -> list[str]:
        """What may be stolen, best first: the tail of the longest route, then of the next longest.

        Partitions in nobody's route (no broker has planned them yet) come before all of these.
        """
        others = [
            [partition for partition in route if partition in self._backlog]
            for name, route in sorted(plan.routes.items())
            if name != self._consumer
        ]
        owned = own.union(*others) if others else own
        free = [partition for partition in self._backlog if partition not in owned]
        others.sort(key=self._load, reverse=True)
        return sorted(free) + [partition for route in others for partition in reversed(route)]

    def _load(self, route: Sequence[str]) -> int:
        return sum(weight(self._backlog[partition]) for partition in route)

    def next_read(self, now_ms: int, *, output_tokens: int) -> Read | None:
        """What to ask for now; None when there is no room or everything in sight is dry.

        output_tokens: what one more task is expected to generate.
        """
        partition = self._wet(now_ms)
        if partition is None:
            return None
        tasks, tokens = self._backlog[partition]
        count = self.fits(tokens // max(1, tasks) + output_tokens)
        return Read(partition, count) if count > 0 else None

    def _wet(self, now_ms: int) -> str | None:
        if self._dwelling in self._backlog and self._is_wet(self._dwelling, now_ms):
            return self._dwelling
        for partition in self._order:
            if self._is_wet(partition, now_ms):
                self._dwelling = partition
                return partition
        return None

    def _is_wet(self, partition: str | None, now_ms: int) -> bool:
        if partition is None:
            return False
        dry = self._dry.get(partition)
        return dry is None or now_ms >= dry[1]

    def answered(self, read: Read, got: int, now_ms: int) -> None:
        """Note how much a read brought."""
        if got < read.most:
            seen = self._backlog.get(read.partition, (0, 0))[0]
            self._dry[read.partition] = (seen, now_ms + DRY_FOR_MS)
        else:
            self._dry.pop(read.partition, None)

    @property
    def dwelling(self) -> str | None:
        return self._dwelling
