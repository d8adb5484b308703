"""P slots, or P + 1 while the busiest stage waits longer than one more slot costs."""

from __future__ import annotations

import pytest

from ppserve.core.plan import StepResult, StepStamps
from ppserve.core.scheduling.slots import HELD_STEPS, MEASURED_STEPS, SlotCount


class Machine:
    """Stages of which each computes 100 ns per step, `fixed` of them whatever its size, and then waits."""

    def __init__(self, num_stages: int, waiting: int, fixed: int) -> None:
        self.num_stages, self.waiting = num_stages, waiting
        self.count = SlotCount(num_stages, lambda _stage: fixed / 1e9)
        self._now = 0

    def run(self, num_steps: int, was_full: bool = True) -> list[int]:
        """The number of slots after each step."""
        chosen = []
        for _ in range(num_steps):
            begun = self._now + self.waiting
            stamps = StepStamps(self._now, self._now, begun, begun, begun + 100, begun + 100)
            self._now = begun + 100
            for stage in range(self.num_stages):
                num_slots = self.count.observe(StepResult(0, 0, stage, stamps), was_full)
            chosen.append(num_slots)
        return chosen


@pytest.mark.parametrize(
    ("num_stages", "waiting", "fixed", "num_slots"),
    [(2, 40, 20, 3), (2, 40, 70, 2), (2, 0, 0, 2), (4, 40, 70, 5), (4, 10, 70, 4), (1, 40, 0, 1)],
)
def test_one_more_slot_where_the_wait_exceeds_what_it_costs(
    num_stages: int, waiting: int, fixed: int, num_slots: int
) -> None:
    assert Machine(num_stages, waiting, fixed).run(2 * MEASURED_STEPS)[-1] == num_slots


def test_the_wait_is_measured_again_with_few_steps() -> None:
    chosen = Machine(2, waiting=40, fixed=20).run(20 * HELD_STEPS)
    assert set(chosen) == {2, 3}
    assert chosen.count(3) > 0.9 * len(chosen)


def test_a_slot_goes_again_when_the_wait_has_gone() -> None:
    machine = Machine(2, waiting=40, fixed=20)
    assert machine.run(2 * MEASURED_STEPS)[-1] == 3
    machine.waiting = 0
    assert machine.run(2 * HELD_STEPS)[-1] == 2


def test_near_the_limit_the_number_that_is_used_stays() -> None:
    machine = Machine(2, waiting=11, fixed=20)
    assert set(machine.run(3 * HELD_STEPS)) == {2}
    machine.waiting = 40
    assert machine.run(2 * MEASURED_STEPS)[-1] == 3
    machine.waiting = 11
    assert machine.run(3 * HELD_STEPS).count(3) > 2 * HELD_STEPS


def test_want_of_work_decides_nothing() -> None:
    assert set(Machine(2, waiting=400, fixed=0).run(HELD_STEPS, was_full=False)) == {2}


def test_the_pause_after_a_loss_does_not_count() -> None:
    machine = Machine(2, waiting=0, fixed=20)
    for _ in range(20):
        machine.run(MEASURED_STEPS // 2)
        machine.count.forget_last_steps()
        machine._now += 10**9
    assert machine.count.num_slots == 2


def test_a_few_steps_decide_nothing() -> None:
    assert set(Machine(2, waiting=400, fixed=0).run(MEASURED_STEPS)) == {2}
