"""Suspects: the killer is found, the innocent are not convicted."""

from __future__ import annotations

import math

import pytest

from consumers.suspects import Suspects


def _hunt(population: int, killer: int) -> tuple[list[int], int]:
    """Run until nobody is suspected; returns the convicted and the number of crashes."""
    suspects, crashes = Suspects(), 1
    convicted = suspects.crashed(range(population))
    while suspects:
        group = suspects.next_group()
        if killer in group:
            crashes += 1
            convicted += suspects.crashed(group)
        else:
            for number in group:
                suspects.ended(number)
    return convicted, crashes


@pytest.mark.parametrize("population", [1, 2, 7, 32, 100])
def test_only_the_killer_is_convicted_in_about_log2_crashes(population: int) -> None:
    for killer in range(population):
        convicted, crashes = _hunt(population, killer)
        assert convicted == [killer]
        assert crashes <= math.ceil(math.log2(population)) + 2


def test_an_engine_killed_once_from_outside_convicts_nobody() -> None:
    suspects = Suspects()
    assert suspects.crashed([4]) == []
    assert suspects.next_group() == [4]
    suspects.ended(4)
    assert not suspects
