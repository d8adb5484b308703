"""Slots: how many there are, chunks and decodes that fill them evenly."""

from __future__ import annotations

import pytest

from ppserve.core.cost_model import Coefficients
from ppserve.core.plan import StepResult, StepStamps
from ppserve.core.scheduling.slot_count import HELD_STEPS, MEASURED_STEPS, SlotCount
from tests.core.scheduling.rig import SchedulerRig, a_request, a_rig, fill


def test_many_short_prompts_pack_into_steps_and_leave_some_for_the_other_slots() -> None:
    rig = a_rig(num_stages=2)
    for i in range(32):
        rig.submit(a_request(f"r{i}", num_prompt=20))
    first, second = fill(rig)
    assert len(first.slices) > 4
    assert first.num_tokens <= 1.5 * second.num_tokens
    assert second.num_tokens <= 1.5 * first.num_tokens


# ---- even slots ----


def decode_sizes(rig: SchedulerRig, num_steps: int) -> list[int]:
    """Slices per step once all prompts are computed and all slots have had one more step."""
    sizes: list[int] = []
    while len(sizes) < num_steps + 2 * rig.scheduler.slots.num_slots:
        plans = fill(rig)
        sizes += [len(plan.slices) for plan in plans if plan.phase == "decode"]
        rig.commit_one()
        rig.check()
    return sizes[2 * rig.scheduler.slots.num_slots :]


@pytest.mark.parametrize(("num_stages", "num_sequences"), [(2, 64), (2, 7), (3, 64), (4, 64), (4, 6)])
def test_decodes_are_spread_evenly(num_stages: int, num_sequences: int) -> None:
    rig = a_rig(num_stages, num_blocks=4000, prefill_chunk=64)
    for i in range(num_sequences):
        rig.submit(a_request(f"r{i}", num_prompt=1 + i % 9, max_tokens=60))
    sizes = decode_sizes(rig, 4 * num_stages)
    assert max(sizes) == -(-num_sequences // num_stages)
    turn = sizes[:num_stages]
    assert sum(turn) >= num_sequences - num_stages
    assert max(sizes) - min(sizes) <= num_stages - 1


def test_what_joins_later_is_spread_too() -> None:
    rig = a_rig(num_stages=2, num_blocks=4000, prefill_chunk=64)
    for i in range(9):
        rig.submit(a_request(f"early{i}", max_tokens=100))
    decode_sizes(rig, 4)
    for i in range(11):
        rig.submit(a_request(f"late{i}", max_tokens=100))
    assert set(decode_sizes(rig, 8)) <= {10}


def test_the_oldest_return_goes_first() -> None:
    rig = a_rig(num_stages=2, prefill_chunk=6, max_num_seqs=8)
    for i in range(3):
        rig.submit(a_request(f"r{i}", max_tokens=30))
    order = []
    for _ in range(30):
        for plan in fill(rig):
            order += [s.sequence_id for s in plan.slices if s.draw is not None]
        rig.commit_one()
    rounds = [order[i : i + 3] for i in range(3, 24, 3)]
    assert all(sorted(one) == [0, 1, 2] for one in rounds), "nobody twice before everybody once"


def test_the_number_of_slots_follows_live() -> None:
    rig = a_rig(num_stages=2, prefill_chunk=4)
    rig.submit(a_request("r", num_prompt=80))
    assert [plan.slot for plan in fill(rig)] == [0, 1]
    rig.scheduler.slots.resize(3)
    assert [plan.slot for plan in fill(rig)] == [2]
    rig.commit_one()
    assert [plan.slot for plan in fill(rig)] == [0], "the lowest that is free"
    rig.scheduler.slots.resize(1)
    rig.commit_one()
    rig.commit_one()
    assert fill(rig) == []
    rig.commit_one()
    assert len(fill(rig)) == 1
    rig.finish()


# ---- P slots, or P + 1 while the busiest stage waits longer than one more slot costs ----


class Machine:
    """Stages of which each computes 100 ns per step, `fixed` of them whatever its size, and then waits."""

    def __init__(self, num_stages: int, waiting: int, fixed: int) -> None:
        self.num_stages, self.waiting = num_stages, waiting
        self.count = SlotCount([Coefficients(step=fixed / 1e9)] * num_stages)
        self._now = 0

    def run(self, num_steps: int, was_full: bool = True) -> list[int]:
        """The number of slots after each step."""
        chosen = []
        for _ in range(num_steps):
            begun = self._now + self.waiting
            stamps = StepStamps(self._now, self._now, begun, begun, begun + 100, begun + 100)
            self._now = begun + 100
            for stage in range(self.num_stages):
                num_slots = self.count.observe(
                    StepResult(epoch=0, step_id=0, stage=stage, stamps=stamps), was_full
                )
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


def test_near_the_limit_the_number_that_is_used_stays_until_the_wait_has_gone() -> None:
    machine = Machine(2, waiting=11, fixed=20)
    assert set(machine.run(3 * HELD_STEPS)) == {2}
    machine.waiting = 40
    assert machine.run(2 * MEASURED_STEPS)[-1] == 3
    machine.waiting = 11
    assert machine.run(3 * HELD_STEPS).count(3) > 2 * HELD_STEPS
    machine.waiting = 0
    assert machine.run(2 * HELD_STEPS)[-1] == 2


@pytest.mark.parametrize(("num_steps", "was_full"), [(HELD_STEPS, False), (MEASURED_STEPS, True)])
def test_want_of_work_and_few_steps_decide_nothing(num_steps: int, was_full: bool) -> None:
    assert set(Machine(2, waiting=400, fixed=0).run(num_steps, was_full)) == {2}


def test_the_pause_after_a_loss_does_not_count() -> None:
    machine = Machine(2, waiting=0, fixed=20)
    for _ in range(20):
        machine._now += 10**9
        machine.run(1, was_full=False)
        machine.run(MEASURED_STEPS // 2)
    assert machine.count.num_slots == 2
