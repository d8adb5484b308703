"""Filling the pipeline: slots, chunks, and decodes spread evenly."""

from __future__ import annotations

import pytest

from tests.core.scheduling.invariants import check_scheduler
from tests.core.scheduling.rig import SchedulerRig, a_request, a_rig, fill


def test_nothing_to_do_is_no_step() -> None:
    rig = a_rig()
    assert rig.schedule_one() is None
    assert not rig.has_work


def test_as_many_steps_in_flight_as_stages() -> None:
    rig = a_rig(num_stages=3, prefill_chunk=4)
    rig.submit(a_request("long", num_prompt=40))
    plans = fill(rig)
    assert [plan.slot for plan in plans] == [0, 1, 2]
    assert rig.steps.num_in_flight == 3


def test_consecutive_chunks_of_one_prompt_are_in_flight_together() -> None:
    rig = a_rig(num_stages=2, prefill_chunk=5)
    rig.submit(a_request("r", num_prompt=9))
    first, second = fill(rig)
    assert (first.slices[0].start, first.slices[0].end, first.slices[0].draw) == (0, 5, None)
    assert (second.slices[0].start, second.slices[0].end) == (5, 9)
    assert second.slices[0].draw is not None
    rig.drain()
    rig.check_answers()


def test_a_lone_long_prompt_is_cut_so_that_every_stage_gets_work() -> None:
    rig = a_rig(num_stages=4, block_size=16)
    rig.submit(a_request("r", num_prompt=900))
    plans = fill(rig)
    assert len(plans) == 4
    sizes = [plan.num_tokens for plan in plans]
    assert max(sizes) <= 900 // 4
    assert max(sizes) <= 2 * min(sizes)


def test_one_stage_cuts_no_prompt_that_fits_a_step() -> None:
    rig = a_rig(num_stages=1, block_size=16)
    rig.submit(a_request("r", num_prompt=500))
    assert [plan.num_tokens for plan in fill(rig)] == [500]


def test_many_short_prompts_pack_into_steps_and_leave_some_for_the_other_slots() -> None:
    rig = a_rig(num_stages=2)
    for i in range(32):
        rig.submit(a_request(f"r{i}", num_prompt=20))
    first, second = fill(rig)
    assert len(first.slices) > 4
    assert first.num_tokens <= 1.5 * second.num_tokens
    assert second.num_tokens <= 1.5 * first.num_tokens


def test_a_chunk_that_is_not_the_last_still_comes_back() -> None:
    rig = a_rig(num_stages=1, prefill_chunk=3)
    rig.submit(a_request("r", num_prompt=6))
    fill(rig)
    assert rig.commit_one() == []
    fill(rig)
    assert [e.offset for e in rig.commit_one()] == [0]


# ---- even slots ----


def decode_sizes(rig: SchedulerRig, num_steps: int) -> list[int]:
    """Slices per step once all prompts are computed and all slots have had one more step."""
    sizes: list[int] = []
    while len(sizes) < num_steps + 2 * rig.scheduler.slots.num_slots:
        plans = fill(rig)
        sizes += [len(plan.slices) for plan in plans if plan.phase == "decode"]
        rig.commit_one()
        check_scheduler(rig.scheduler)
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


def test_fewer_sequences_than_slots_take_fewer_slots() -> None:
    rig = a_rig(num_stages=4)
    rig.submit(a_request("r", num_prompt=3))
    assert len(fill(rig)) == 1
    rig.commit_one()
    assert len(fill(rig)) == 1


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
    assert len(fill(rig)) == 2
    rig.scheduler.slots.resize(3)
    assert len(fill(rig)) == 1
    rig.scheduler.slots.resize(1)
    rig.commit_one()
    rig.commit_one()
    assert fill(rig) == []
    rig.commit_one()
    assert len(fill(rig)) == 1
    rig.drain()
    rig.check_answers()
