"""Who works on what: a backlog and the live consumers in, routes out.

This planner is the simplest honest one. Slots are laid in a row and cut where the tokens divide
evenly; a partition keeps its owner for as long as that owner lives, and what is new goes to whoever
has the least. Speeds are not known to it yet: a consumer whose route runs dry steals from the end
of the longest other route, so unequal cards still finish together.

Pure and deterministic: equal inputs give equal plans, byte for byte (names are sorted first).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgpack

from broker.geometry import slot_major


class Plan(NamedTuple):
    """All routes. `version` grows by one with every plan that differs from the one before."""

    version: int
    routes: dict[str, list[str]]

    def encode(self) -> bytes:
        packed: bytes = msgpack.packb({"version": self.version, "routes": self.routes})
        return packed

    @classmethod
    def decode(cls, data: bytes | None) -> Plan:
        if data is None:
            return cls(0, {})
        fields: dict[str, Any] = msgpack.unpackb(data)
        return cls(fields["version"], fields["routes"])


def make_plan(
    backlog: Mapping[str, tuple[int, int]], consumers: Sequence[str], current: Plan
) -> Plan:
    """Routes over (tasks, tokens) per partition; `current` itself when nothing moves."""
    names = sorted(consumers)
    if not names:
        return current
    owners = {partition: name for name in names for partition in current.routes.get(name, ())}
    routes: dict[str, list[str]] = {name: [] for name in names}
    load = dict.fromkeys(names, 0)
    new = []
    for partition in sorted(backlog, key=slot_major):
        owner = owners.get(partition)
        if owner is None:
            new.append(partition)
        else:
            routes[owner].append(partition)
            load[owner] += weight(backlog[partition])
    _deal(new, backlog, routes, load)
    for route in routes.values():
        route.sort(key=slot_major)
    if routes.keys() == current.routes.keys() and not new:
        return current
    return Plan(current.version + 1, routes)


def weight(counts: tuple[int, int]) -> int:
    """Prompt tokens of a partition, plus a little for each task so that none weighs nothing."""
    tasks, tokens = counts
    return tokens + tasks


def _deal(
    new: Sequence[str],
    backlog: Mapping[str, tuple[int, int]],
    routes: dict[str, list[str]],
    load: dict[str, int],
) -> None:
    """Cut the row of new partitions into runs that bring every consumer to an equal load."""
    total = sum(load.values()) + sum(weight(backlog[partition]) for partition in new)
    share = total / len(routes)
    order = sorted(routes, key=lambda name: (load[name], name))
    place = 0
    for partition in new:
        # A slot is never cut between its buckets while the owner still has room for half of it.
        heavy = weight(backlog[partition])
        while place < len(order) - 1 and load[order[place]] + heavy / 2 > share:
            place += 1
        routes[order[place]].append(partition)
        load[order[place]] += heavy
