"""P lanes, or one more while the return takes longer than a stage."""

from __future__ import annotations

from ppserve.core.lane_count import MIN_STEPS, LaneCount


def observed(count: LaneCount, return_s: float, stage_s: float, num_steps: int = 200) -> int:
    for _ in range(num_steps):
        count.observe(return_s, stage_s)
    return count.choice


def test_as_many_lanes_as_stages_while_the_return_is_short() -> None:
    assert observed(LaneCount(2), return_s=0.001, stage_s=0.02) == 2


def test_one_more_while_the_return_takes_longer_than_a_stage() -> None:
    assert observed(LaneCount(2), return_s=0.003, stage_s=0.001) == 3


def test_it_comes_back_when_the_stages_slow_down() -> None:
    count = LaneCount(4)
    assert observed(count, 0.003, 0.001) == 5
    assert observed(count, 0.003, 0.02) == 4


def test_it_does_not_flutter_where_both_are_about_equal() -> None:
    count = LaneCount(2)
    observed(count, 0.003, 0.001)
    choices = {count.observe(0.001 * (0.9 + 0.2 * (i % 2)), 0.001) for i in range(500)}
    assert choices == {3}


def test_a_few_steps_decide_nothing() -> None:
    assert observed(LaneCount(2), 1.0, 0.001, MIN_STEPS - 1) == 2


def test_a_single_stage_needs_no_second_lane() -> None:
    assert observed(LaneCount(1), 0.003, 0.001) == 1
