"""Who killed the engine: suspects are split in halves until the killer is alone.

    crash with {a b c d} in flight ──► {a b} {c d}    one group at a time runs in the new engine
    crash with {c d}               ──► {c} {d}        {a b} finished: innocent
    crash with {d}, twice          ──► d is convicted

About log2(in flight) respawns find one killer. A task is convicted only after the engine died twice
with nothing else in flight, because an engine may also be killed from outside. While there are
suspects nothing else is given to the engine.

Pure: numbers in, numbers out.
"""

from __future__ import annotations

from collections.abc import Collection

_DEATHS_ALONE = 2


class Suspects:
    """The groups that still have to run by themselves, next one first."""

    def __init__(self) -> None:
        self._groups: list[list[int]] = []
        self._running: list[int] = []
        self._deaths: dict[int, int] = {}

    def __bool__(self) -> bool:
        """Whether normal feeding must wait."""
        return bool(self._groups or self._running)

    def alone(self, number: int) -> None:
        """This one has been near several deaths: run it by itself."""
        self._groups.append([number])

    def crashed(self, in_flight: Collection[int]) -> list[int]:
        """The engine died with these in flight; returns whom that convicts."""
        group = sorted(in_flight)
        self._running = []
        if not group:
            return []
        if len(group) > 1:
            middle = len(group) // 2
            self._groups[:0] = [group[:middle], group[middle:]]
            return []
        only = group[0]
        self._deaths[only] = self._deaths.get(only, 0) + 1
        if self._deaths[only] >= _DEATHS_ALONE:
            del self._deaths[only]
            return [only]
        self._groups.insert(0, group)
        return []

    def next_group(self) -> list[int]:
        """The group to run now; empty while one is running or none is left."""
        if self._running or not self._groups:
            return []
        self._running = self._groups.pop(0)
        return list(self._running)

    def ended(self, number: int) -> None:
        """A generation completed: whatever it was near, it is innocent."""
        self._deaths.pop(number, None)
        if number in self._running:
            self._running.remove(number)

    def withdraw(self) -> list[int]:
        """Give up on all that has not run (drain); returns their numbers."""
        waiting = [number for group in self._groups for number in group]
        self._groups = []
        return waiting
