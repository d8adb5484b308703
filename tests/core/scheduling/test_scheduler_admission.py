"""Who gets in, who is told to come back, who is too late; and that blocks come back at once."""

from __future__ import annotations

import pytest

from ppserve.core.request import FinishReason, OutputOptions
from ppserve.core.scheduling.scheduler import Scheduler, SchedulerConfig
from ppserve.errors import InvalidRequest, Overloaded
from tests.core.scheduling.house import House, a_house, a_request, fill

# ---- requests that could never run ----


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_prompt": 0}, "prompt"),
        ({"num_prompt": 100, "max_tokens": 30}, "prompt"),
        ({"num_sequences": 5}, "sampling.n"),
        ({"num_sequences": 0}, "sampling.n"),
        ({"num_prompt": 60, "max_tokens": 40}, "stop.max_tokens"),
        ({"num_prompt": 10, "max_tokens": 30, "num_sequences": 4}, "stop.max_tokens"),
        ({"max_tokens": 1, "resume_index": 0, "resume_ids": (1, 2)}, "resume.generated_token_ids"),
    ],
)
def test_what_can_never_run_is_refused_by_name(fields: dict[str, int], named: str) -> None:
    house = a_house(num_blocks=20, max_model_len=128, max_num_seqs=4)
    with pytest.raises(InvalidRequest) as refusal:
        house.submit(a_request("r", **fields))  # type: ignore[arg-type]
    assert [v.field for v in refusal.value.violations] == [named]
    assert not house.scheduler.has_work


def test_several_mistakes_are_reported_together() -> None:
    house = a_house(max_num_seqs=4, max_model_len=20)
    with pytest.raises(InvalidRequest) as refusal:
        house.submit(a_request("r", num_prompt=19, max_tokens=9, num_sequences=9))
    assert len(refusal.value.violations) == 2


def test_a_request_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    house = a_house()
    house.submit(a_request("r"))
    with pytest.raises(InvalidRequest):
        house.submit(a_request("r"))
    house.drain()
    house.events.clear()
    assert house.submit(a_request("r"))
    house.drain()
    house.check_answers()


def test_what_just_fits_runs() -> None:
    house = a_house(num_blocks=10, block_size=4)
    house.submit(a_request("r", num_prompt=20, max_tokens=21))
    house.drain()
    house.check_answers()
    with pytest.raises(InvalidRequest):
        house.submit(a_request("one more", num_prompt=20, max_tokens=22))


# ---- the queue ----


def test_worst_case_blocks_are_reserved_so_nobody_is_ever_preempted() -> None:
    house = a_house(num_blocks=10, block_size=4, prefix_cache=False)
    for i in range(4):
        house.submit(a_request(f"r{i}", num_prompt=5, max_tokens=12))
    assert house.scheduler.num_running == 2
    assert house.scheduler.num_waiting == 2
    house.drain()
    house.check_answers()
    steps_of: dict[int, list[int]] = {}
    for plan in house.pipeline.plans:
        for piece in plan.slices:
            steps_of.setdefault(piece.sequence_id, []).append(piece.start)
    assert all(starts == sorted(set(starts)) for starts in steps_of.values()), "nothing was computed twice"


def test_no_more_sequences_than_allowed() -> None:
    house = a_house(num_blocks=4000, max_num_seqs=3)
    for i in range(5):
        house.submit(a_request(f"r{i}", num_sequences=2))
    assert house.scheduler.num_running == 2
    house.drain()
    house.check_answers()


def test_the_queue_is_bounded_by_requests_that_really_wait() -> None:
    house = a_house(max_num_seqs=2, max_queue=3)
    for i in range(5):
        house.scheduler.submit(a_request(f"r{i}"), 0.0)
    with pytest.raises(Overloaded) as refusal:
        house.scheduler.submit(a_request("r5"), 0.0)
    assert refusal.value.retry_after_s > 0
    assert (house.scheduler.num_running, house.scheduler.num_waiting) == (2, 3)
    house.scheduler.check_invariants()


def test_no_queue_at_all_still_serves_what_fits() -> None:
    house = a_house(max_num_seqs=1, max_queue=0)
    assert house.submit(a_request("a"))
    assert not house.submit(a_request("b"))
    house.drain()
    assert house.submit(a_request("c"))
    house.drain()
    house.check_answers()


def test_the_queue_is_bounded_by_tokens() -> None:
    house = a_house(max_num_seqs=1, max_queue_tokens=40)
    for i in range(3):
        house.scheduler.submit(a_request(f"r{i}", num_prompt=10, max_tokens=10), 0.0)
    with pytest.raises(Overloaded):
        house.scheduler.submit(a_request("r3", num_prompt=10, max_tokens=10), 0.0)
    assert house.scheduler.num_waiting == 2


def test_a_refused_request_leaves_nothing_behind() -> None:
    house = a_house(max_num_seqs=1, max_queue=1)
    for i in range(2):
        house.submit(a_request(f"r{i}"))
    for i in range(50):
        assert not house.submit(a_request(f"refused{i}", deadline_s=1e9, caller=f"c{i}"))
    house.scheduler.check_invariants()
    assert house.scheduler.expire(2e9) == []
    house.drain()
    house.check_answers()


def measured(house: House, tokens_per_s: float) -> None:
    """Gives the scheduler something to predict from."""
    for i in range(20):
        house.submit(a_request(f"warm{i}", num_prompt=50, max_tokens=1))
        while house.scheduler.has_work:
            plan = house.schedule_one()
            if plan is not None:
                house.now += plan.num_tokens / tokens_per_s
            house.commit_one()


def test_a_wait_longer_than_the_deadline_is_refused_at_once() -> None:
    house = a_house(max_num_seqs=1, num_blocks=4000, prefix_cache=False)
    measured(house, tokens_per_s=100.0)
    house.submit(a_request("running", max_tokens=200))
    house.submit(a_request("waiting", num_prompt=100, max_tokens=200))
    with pytest.raises(Overloaded, match="longer than the deadline"):
        house.scheduler.submit(a_request("hurried", deadline_s=house.now + 1.0), house.now)
    assert house.submit(a_request("patient", deadline_s=house.now + 10.0))
    assert house.submit(a_request("important", priority=1, deadline_s=house.now + 1.0)), "nothing is ahead of it"


def test_the_prediction_learns_that_requests_end_before_their_limit() -> None:
    house = a_house(max_num_seqs=1, num_blocks=4000, prefix_cache=False)
    for i in range(40):
        house.submit(a_request(f"r{i}", num_prompt=10, max_tokens=500))
        fill(house)
        house.now += 0.1
        (event,) = house.commit_one()
        house.scheduler.finish(event.sequence_id, FinishReason.STOP_STRING, house.now)
    house.submit(a_request("running", num_prompt=10, max_tokens=500))
    house.submit(a_request("waiting", num_prompt=10, max_tokens=500))
    # By its limit the one ahead would take about 5 s; by experience it takes a fraction of a second.
    assert house.submit(a_request("hurried", deadline_s=house.now + 1.0))


def test_priority_and_fairness_decide_who_is_next() -> None:
    house = a_house(max_num_seqs=1)
    house.submit(a_request("running", caller="flood"))
    for i in range(5):
        house.submit(a_request(f"flood{i}", caller="flood"))
    house.submit(a_request("light", caller="light"))
    house.submit(a_request("urgent", caller="flood", priority=1))
    house.drain()
    admitted = sorted(house.events, key=lambda key: house.events[key][0].admitted_s or 0.0)
    ends = [request for request, _ in house.events]
    assert ends[:3] == ["running", "urgent", "light"]
    assert len(admitted) == 8


def test_under_a_steady_flood_a_light_caller_waits_for_one_request() -> None:
    house = a_house(max_num_seqs=2, max_queue=10_000, num_blocks=1000)
    for i in range(200):
        house.submit(a_request(f"flood{i}", caller="flood"))
    positions = []
    for k in range(10):
        for _ in range(20):
            fill(house)
            house.commit_one()
        house.submit(a_request(f"light{k}", caller="light"))
        before = len(house.events)
        while (f"light{k}", 0) not in house.events:
            fill(house)
            house.commit_one()
        positions.append(len(house.events) - before)
    assert max(positions) <= 3


def test_long_answers_count_for_more_than_short_ones() -> None:
    house = a_house(max_num_seqs=1, num_blocks=1000)
    for i in range(30):
        house.submit(a_request(f"long{i}", num_prompt=2, max_tokens=18, caller="long"))
        house.submit(a_request(f"short{i}", num_prompt=2, max_tokens=2, caller="short"))
    house.drain()
    first = [request for request, _ in house.events][:24]
    assert sum(name.startswith("short") for name in first) == 20


# ---- deadlines and cancellation ----


def test_the_late_are_dropped_before_they_cost_a_step() -> None:
    house = a_house(max_num_seqs=1)
    house.submit(a_request("running", max_tokens=20))
    house.submit(a_request("late", deadline_s=5.0))
    assert house.scheduler.expire(4.9) == []
    fill(house)
    house.now = 5.0
    house.drain()
    (event,) = house.events["late", 0]
    assert (event.finish, event.token_id, event.admitted_s) == (FinishReason.DEADLINE, None, None)
    late_id = event.sequence_id
    assert all(s.sequence_id != late_id for plan in house.pipeline.plans for s in plan.slices)


def test_a_running_request_ends_at_its_deadline() -> None:
    house = a_house()
    house.submit(a_request("r", max_tokens=50, deadline_s=3.0))
    for _ in range(3):
        fill(house)
        house.commit_one()
        house.now += 1.0
    house.drain()
    house.check_answers()
    assert house.events["r", 0][-1].finish is FinishReason.DEADLINE
    assert len(house.events["r", 0]) == 3 + 1


def test_a_deadline_does_not_outlive_its_request() -> None:
    house = a_house()
    house.submit(a_request("r", deadline_s=5.0))
    house.drain()
    house.events.clear()
    house.submit(a_request("r", max_tokens=30, deadline_s=50.0))
    house.now = 6.0
    house.drain()
    assert house.events["r", 0][-1].finish is FinishReason.MAX_TOKENS


def test_many_ended_deadlines_are_not_kept() -> None:
    house = a_house()
    for i in range(2000):
        house.submit(a_request(f"r{i}", deadline_s=1e6 + i))
        house.tell(house.scheduler.abort(f"r{i}", FinishReason.CANCELLED))
    assert len(house.scheduler._deadlines._heap) < 200


def test_cancelling_while_waiting() -> None:
    house = a_house(max_num_seqs=1)
    house.submit(a_request("running"))
    house.submit(a_request("waiting"))
    (event,) = house.tell(house.scheduler.abort("waiting", FinishReason.CANCELLED))
    assert event.finish is FinishReason.CANCELLED
    assert house.scheduler.num_waiting == 0
    house.drain()
    house.check_answers()


def test_cancelling_between_steps_frees_the_blocks_at_once() -> None:
    house = a_house()
    house.submit(a_request("r", max_tokens=50))
    fill(house)
    house.commit_one()
    house.tell(house.scheduler.abort("r", FinishReason.CANCELLED))
    assert house.scheduler.kv_usage == 0
    assert not house.scheduler.has_work


def test_cancelling_in_flight_frees_the_blocks_at_the_commit() -> None:
    house = a_house(num_stages=2, prefill_chunk=4)
    house.submit(a_request("r", num_prompt=8, max_tokens=50))
    assert len(fill(house)) == 2
    assert len(house.tell(house.scheduler.abort("r", FinishReason.CANCELLED))) == 1
    assert house.scheduler.num_running == 0
    house.commit_one()
    assert house.scheduler.kv_usage > 0, "the second chunk is still being written"
    assert house.commit_one() == []
    assert house.scheduler.kv_usage == 0
    assert not house.scheduler.has_work


def test_cancelling_twice_or_for_nobody_is_nothing() -> None:
    house = a_house()
    house.submit(a_request("r"))
    fill(house)
    assert len(house.scheduler.abort("r", FinishReason.CANCELLED)) == 1
    assert house.scheduler.abort("r", FinishReason.CANCELLED) == []
    assert house.scheduler.abort("nobody", FinishReason.CANCELLED) == []


def test_room_that_an_end_makes_is_used_in_the_next_step() -> None:
    house = a_house(max_num_seqs=1)
    house.submit(a_request("first", max_tokens=50))
    house.submit(a_request("second"))
    fill(house)
    house.commit_one()
    house.tell(house.scheduler.abort("first", FinishReason.CANCELLED))
    (plan,) = fill(house)
    assert [s.sequence_id for s in plan.slices] == [1]


def test_half_scored_prompts_are_not_delivered() -> None:
    house = a_house(prefill_chunk=4)
    house.submit(a_request("r", num_prompt=12, output=OutputOptions(prompt_logprobs=0)))
    fill(house)
    house.commit_one()
    (event,) = house.tell(house.scheduler.abort("r", FinishReason.CANCELLED))
    assert event.prompt_logprobs == ()


def test_block_sizes_must_agree() -> None:
    house = a_house(block_size=4)
    with pytest.raises(ValueError, match="block_size"):
        Scheduler(SchedulerConfig(2, block_size=8), house.blocks, house.steps)
