"""What further rows cost a lone sequence."""

from __future__ import annotations

import random

import pytest

from ppserve.core.scheduling.row_cost import RowCost


@pytest.mark.parametrize("share", [0.0, 0.05, 0.2, 1.0])
def test_the_share_is_found_though_some_steps_are_late(share: float) -> None:
    chance, cost = random.Random(1), RowCost()
    for number in range(200):
        count = number % 4
        late = 5.0 if chance.random() < 0.1 else 1.0
        cost.observe(count, late * chance.lognormvariate(0.0, 0.02) * (1 + share * count))
    assert cost.share() == pytest.approx(share, abs=0.02)


def test_rows_cost_nothing_until_they_were_tried() -> None:
    cost = RowCost()
    for _ in range(50):
        cost.observe(0, 1.0)
    assert cost.share() == 0
    assert not cost.is_known
    for _ in range(3):
        cost.observe(1, 1.5)
    assert cost.share() == pytest.approx(0.5)
    assert cost.is_known


def test_steps_without_guesses_must_be_known_as_well() -> None:
    cost = RowCost()
    for _ in range(50):
        cost.observe(2, 1.0)
    assert cost.share() == 0
    assert not cost.is_known


def test_a_cost_of_a_bad_moment_is_forgotten() -> None:
    cost = RowCost()
    for seconds in (1.0, 3.0):
        for _ in range(9):
            cost.observe(int(seconds > 1), seconds)
    assert cost.share() == pytest.approx(2.0)
    cost.forget()
    assert cost.share() == 0
    for _ in range(9):
        cost.observe(1, 1.1)
    assert cost.share() == pytest.approx(0.1)
