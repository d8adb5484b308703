"""Admission: requests that are admitted, refused, or past their deadline; freed blocks are used at once."""

from __future__ import annotations

import random
from collections import deque

import pytest

from ppserve.core.request import FinishReason, OutputOptions
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.core.scheduling.scheduler import Scheduler
from ppserve.errors import InvalidRequest, Overloaded
from tests.core.scheduling.invariants import check_scheduler
from tests.core.scheduling.rig import SchedulerRig, a_request, a_rig, fill

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
    rig = a_rig(num_blocks=20, max_model_len=128, max_num_seqs=4)
    with pytest.raises(InvalidRequest) as refusal:
        rig.submit(a_request("r", **fields))  # type: ignore[arg-type]
    assert [v.field for v in refusal.value.violations] == [named]
    assert not rig.has_work


def test_several_mistakes_are_reported_together() -> None:
    rig = a_rig(max_num_seqs=4, max_model_len=20)
    with pytest.raises(InvalidRequest) as refusal:
        rig.submit(a_request("r", num_prompt=19, max_tokens=9, num_sequences=9))
    assert len(refusal.value.violations) == 2


def test_a_request_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    rig = a_rig()
    rig.submit(a_request("r"))
    with pytest.raises(InvalidRequest):
        rig.submit(a_request("r"))
    rig.drain()
    rig.events.clear()
    assert rig.submit(a_request("r"))
    rig.drain()
    rig.check_answers()


def test_what_just_fits_runs() -> None:
    rig = a_rig(num_blocks=10, block_size=4)
    rig.submit(a_request("r", num_prompt=20, max_tokens=21))
    rig.drain()
    rig.check_answers()
    with pytest.raises(InvalidRequest):
        rig.submit(a_request("one more", num_prompt=20, max_tokens=22))


# ---- the queue ----


def test_worst_case_blocks_are_reserved_so_nobody_is_ever_preempted() -> None:
    rig = a_rig(num_blocks=10, block_size=4, prefix_cache=False)
    for i in range(4):
        rig.submit(a_request(f"r{i}", num_prompt=5, max_tokens=12))
    assert rig.scheduler.num_running == 2
    assert rig.scheduler.intake.num_waiting == 2
    rig.drain()
    rig.check_answers()
    steps_of: dict[int, list[int]] = {}
    for plan in rig.pipeline.plans:
        for piece in plan.slices:
            steps_of.setdefault(piece.sequence_id, []).append(piece.start)
    assert all(starts == sorted(set(starts)) for starts in steps_of.values()), "nothing was computed twice"


def test_no_more_sequences_than_allowed() -> None:
    rig = a_rig(num_blocks=4000, max_num_seqs=3)
    for i in range(5):
        rig.submit(a_request(f"r{i}", num_sequences=2))
    assert rig.scheduler.num_running == 2
    rig.drain()
    rig.check_answers()


def test_the_queue_is_bounded_by_requests_that_really_wait() -> None:
    rig = a_rig(max_num_seqs=2, max_queue=3)
    for i in range(5):
        rig.scheduler.intake.submit(a_request(f"r{i}"), 0.0)
    with pytest.raises(Overloaded) as refusal:
        rig.scheduler.intake.submit(a_request("r5"), 0.0)
    assert refusal.value.retry_after_s > 0
    assert (rig.scheduler.num_running, rig.scheduler.intake.num_waiting) == (2, 3)
    check_scheduler(rig.scheduler)


@pytest.mark.parametrize("max_queue", [0, 2])
def test_who_is_refused_without_looking_would_be_refused_in_any_case(max_queue: int) -> None:
    """And the other way round, where no request is so short that it fits beside what is there, and nobody was
    displaced, who takes the next free place."""
    rig, dice, num_refused = a_rig(max_num_seqs=2, max_queue=max_queue, num_blocks=60), random.Random(0), 0
    for i in range(200):
        refusal = rig.scheduler.intake.refusals.full
        asked = a_request(f"r{i}", priority=dice.randrange(3), caller=dice.choice("ab"))
        nobody_displaced = rig.scheduler.intake.num_waiting == len(rig.scheduler.intake.queue)
        is_in = rig.submit(asked)
        assert not (is_in and refusal)
        assert is_in or refusal or not nobody_displaced
        num_refused += refusal is not None
        for _ in range(dice.randrange(4)):
            fill(rig)
            if rig.pipeline.num_in_flight:
                rig.commit_one()
    assert num_refused > 20
    rig.drain()
    assert rig.scheduler.intake.refusals.full is None


def test_no_queue_at_all_still_serves_what_fits() -> None:
    rig = a_rig(max_num_seqs=1, max_queue=0)
    assert rig.submit(a_request("a"))
    assert not rig.submit(a_request("b"))
    rig.drain()
    assert rig.submit(a_request("c"))
    rig.drain()
    rig.check_answers()


def test_the_queue_is_bounded_by_tokens() -> None:
    rig = a_rig(max_num_seqs=1, max_queue_tokens=40)
    for i in range(3):
        rig.scheduler.intake.submit(a_request(f"r{i}", num_prompt=10, max_tokens=10), 0.0)
    with pytest.raises(Overloaded):
        rig.scheduler.intake.submit(a_request("r3", num_prompt=10, max_tokens=10), 0.0)
    assert rig.scheduler.intake.num_waiting == 2


def test_a_refused_request_leaves_nothing_behind() -> None:
    rig = a_rig(max_num_seqs=1, max_queue=1)
    for i in range(2):
        rig.submit(a_request(f"r{i}"))
    for i in range(50):
        assert not rig.submit(a_request(f"refused{i}", deadline_s=1e9, caller=f"c{i}"))
    check_scheduler(rig.scheduler)
    assert rig.scheduler.intake.expire(2e9) == []
    rig.drain()
    rig.check_answers()


def measured(rig: SchedulerRig, tokens_per_s: float) -> None:
    """Lets the scheduler measure a throughput, from which it predicts waiting times."""
    for i in range(20):
        rig.submit(a_request(f"warm{i}", num_prompt=50, max_tokens=1))
        while rig.has_work:
            plan = rig.schedule_one()
            if plan is not None:
                rig.now += plan.num_tokens / tokens_per_s
            rig.commit_one()


def test_a_wait_longer_than_the_deadline_is_refused_at_once() -> None:
    rig = a_rig(max_num_seqs=1, num_blocks=4000, prefix_cache=False)
    measured(rig, tokens_per_s=100.0)
    rig.submit(a_request("running", max_tokens=200))
    rig.submit(a_request("waiting", num_prompt=100, max_tokens=200))
    with pytest.raises(Overloaded, match="longer than the deadline"):
        rig.scheduler.intake.submit(a_request("hurried", deadline_s=rig.now + 1.0), rig.now)
    assert rig.submit(a_request("patient", deadline_s=rig.now + 10.0))
    assert rig.submit(a_request("important", priority=1, deadline_s=rig.now + 1.0)), "nothing is ahead of it"


def test_the_prediction_learns_that_requests_end_before_their_limit() -> None:
    rig = a_rig(max_num_seqs=1, num_blocks=4000, prefix_cache=False)
    for i in range(40):
        rig.submit(a_request(f"r{i}", num_prompt=10, max_tokens=500))
        fill(rig)
        rig.now += 0.1
        (event,) = rig.commit_one()
        rig.scheduler.intake.finish(event.sequence_id, FinishReason.STOP_STRING, event.offset + 1)
    rig.submit(a_request("running", num_prompt=10, max_tokens=500))
    rig.submit(a_request("waiting", num_prompt=10, max_tokens=500))
    # By max_tokens the request before it would take about 5 s; as measured, it takes a fraction of a second.
    assert rig.submit(a_request("hurried", deadline_s=rig.now + 1.0))


def test_priority_and_fairness_decide_who_is_next() -> None:
    rig = a_rig(max_num_seqs=1)
    rig.submit(a_request("running", caller="flood"))
    for i in range(5):
        rig.submit(a_request(f"flood{i}", caller="flood"))
    rig.submit(a_request("light", caller="light"))
    rig.submit(a_request("urgent", caller="flood", priority=1))
    rig.drain()
    admitted = sorted(rig.events, key=lambda key: rig.events[key][0].admitted_s or 0.0)
    ends = [request for request, _ in rig.events]
    assert ends[:3] == ["running", "urgent", "light"]
    assert len(admitted) == 8


def test_while_one_caller_keeps_submitting_another_waits_for_one_request() -> None:
    rig = a_rig(max_num_seqs=2, max_queue=10_000, num_blocks=1000)
    for i in range(200):
        rig.submit(a_request(f"flood{i}", caller="flood"))
    positions = []
    for k in range(10):
        for _ in range(20):
            fill(rig)
            rig.commit_one()
        rig.submit(a_request(f"light{k}", caller="light"))
        before = len(rig.events)
        while (f"light{k}", 0) not in rig.events:
            fill(rig)
            rig.commit_one()
        positions.append(len(rig.events) - before)
    assert max(positions) <= 3


def test_long_answers_count_for_more_than_short_ones() -> None:
    rig = a_rig(max_num_seqs=1, num_blocks=1000)
    for i in range(30):
        rig.submit(a_request(f"long{i}", num_prompt=2, max_tokens=18, caller="long"))
        rig.submit(a_request(f"short{i}", num_prompt=2, max_tokens=2, caller="short"))
    rig.drain()
    first = [request for request, _ in rig.events][:24]
    assert sum(name.startswith("short") for name in first) == 20


@pytest.mark.parametrize("num_running", [4, 16])
def test_an_answer_that_would_be_late_is_refused_although_it_could_begin_at_once(num_running: int) -> None:
    """One token a step for each, a second a step. Where few run, nothing is predicted."""
    rig = a_rig(num_blocks=4000, max_num_seqs=64)
    for i in range(num_running):
        rig.submit(a_request(f"r{i}", num_prompt=1, max_tokens=100))
    for _ in range(40):
        rig.schedule_one()
        rig.now += 1.0
        if rig.pipeline.num_in_flight:
            rig.commit_one()
    assert rig.submit(a_request("patient", num_prompt=1, max_tokens=5, deadline_s=rig.now + 100.0))
    hurried = a_request("hurried", num_prompt=1, max_tokens=20, deadline_s=rig.now + 3.0)
    if num_running < 8:
        assert rig.submit(hurried)
    else:
        with pytest.raises(Overloaded, match="longer than its deadline"):
            rig.scheduler.intake.submit(hurried, rig.now)
        told = rig.scheduler.intake.refusals
        late, in_s = told.late, rig.now + 3.0
        assert told.of(20, 0, in_s, rig.now) is told.of(30, -1, in_s - 1.0, rig.now) is late is not None
        assert told.of(19, 0, in_s, rig.now) is None, "a shorter answer may be in time"
        assert told.of(20, 1, in_s, rig.now) is None, "a higher priority may be in time"
        assert told.of(20, 0, in_s + 1000.0, rig.now) is told.of(20, 0, None, rig.now) is None
        assert told.of(20, 0, in_s, rig.now + 0.1) is None, "by then much may have ended"
    assert rig.submit(a_request("without", num_prompt=1, max_tokens=20))
    rig.drain()


def overloaded(rig: SchedulerRig, times: float, limit_s: float, seconds: float, early: bool) -> tuple[int, ...]:
    """So many times the requests that can be served, each with a time limit: (answers, admitted but late, those
    of which the intake was asked). A step takes 4 ms, and 0.4 ms a row. early: refused unasked where possible."""
    dice, sent, asked, good, late, due_s = random.Random(0), 0, 0, 0, 0, 0.0
    rows: deque[int] = deque()
    while rig.now < seconds:
        while due_s < rig.now:
            due_s += dice.expovariate(50.0 * times)
            sent += 1
            if early and rig.scheduler.intake.refusals.of(24, 0, rig.now + limit_s, rig.now):
                continue
            asked += 1
            rig.submit(a_request(f"r{sent}", num_prompt=8, max_tokens=24, deadline_s=rig.now + limit_s))
        late += len(rig.scheduler.intake.expire(rig.now))
        while (plan := rig.schedule_one()) is not None:
            rows.append(plan.num_tokens)
        if rows:
            rig.now += 0.004 + 0.0004 * rows.popleft()
            good += sum(event.is_terminal for event in rig.commit_one())
        else:
            rig.now = due_s + 1e-6
    return good, late, asked


@pytest.mark.parametrize("limit_s", [1.0, 3.0])
def test_under_overload_those_who_are_admitted_end_in_time(limit_s: float) -> None:
    """Answers cut off by their deadline taught that answers are short, and ever more were admitted. Most of those
    who are refused are so before the intake is asked, for the reason that it told the one before."""
    usual, _, _ = overloaded(a_rig(num_blocks=9000, max_num_seqs=256), 0.8, 100.0, 6.0, early=False)
    good, late, asked = overloaded(a_rig(num_blocks=9000, max_num_seqs=256), 10.0, limit_s, 6.0, early=True)
    assert good >= 0.9 * usual
    assert late <= 0.01 * good
    assert asked < 0.5 * 10 * 50 * 6


# ---- deadlines and cancellation ----


def test_overdue_requests_end_before_they_cost_a_step() -> None:
    rig = a_rig(max_num_seqs=1)
    rig.submit(a_request("running", max_tokens=20))
    rig.submit(a_request("late", deadline_s=5.0))
    assert rig.scheduler.intake.expire(4.9) == []
    fill(rig)
    rig.now = 5.0
    rig.drain()
    (event,) = rig.events["late", 0]
    assert (event.finish, event.token_id, event.admitted_s) == (FinishReason.DEADLINE, None, None)
    late_id = event.sequence_id
    assert all(s.sequence_id != late_id for plan in rig.pipeline.plans for s in plan.slices)


def test_a_running_request_ends_at_its_deadline() -> None:
    rig = a_rig()
    rig.submit(a_request("r", max_tokens=50, deadline_s=3.0))
    for _ in range(3):
        fill(rig)
        rig.commit_one()
        rig.now += 1.0
    rig.drain()
    rig.check_answers()
    assert rig.events["r", 0][-1].finish is FinishReason.DEADLINE
    assert len(rig.events["r", 0]) == 3 + 1


def test_a_deadline_does_not_outlive_its_request() -> None:
    rig = a_rig()
    rig.submit(a_request("r", deadline_s=5.0))
    rig.drain()
    rig.events.clear()
    rig.submit(a_request("r", max_tokens=30, deadline_s=50.0))
    rig.now = 6.0
    rig.drain()
    assert rig.events["r", 0][-1].finish is FinishReason.MAX_TOKENS


def test_each_deadline_is_kept_whatever_ended_before() -> None:
    rig = a_rig(max_num_seqs=1)
    for name, deadline_s in (("runs", None), ("late", 9.0), ("early", 3.0), ("gone", 2.0), ("later", 9.5)):
        rig.submit(a_request(name, max_tokens=30, deadline_s=deadline_s))
    rig.tell(rig.scheduler.intake.abort("gone", FinishReason.CANCELLED))
    expire = rig.scheduler.intake.expire
    overdue = {now: [event.request_id for event in expire(now)] for now in (2.5, 3.5, 4.0, 10.0)}
    assert overdue == {2.5: [], 3.5: ["early"], 4.0: [], 10.0: ["late", "later"]}


def test_cancelling_while_waiting() -> None:
    rig = a_rig(max_num_seqs=1)
    rig.submit(a_request("running"))
    rig.submit(a_request("waiting"))
    (event,) = rig.tell(rig.scheduler.intake.abort("waiting", FinishReason.CANCELLED))
    assert event.finish is FinishReason.CANCELLED
    assert rig.scheduler.intake.num_waiting == 0
    rig.drain()
    rig.check_answers()


def test_cancelling_between_steps_frees_the_blocks_at_once() -> None:
    rig = a_rig()
    rig.submit(a_request("r", max_tokens=50))
    fill(rig)
    rig.commit_one()
    rig.tell(rig.scheduler.intake.abort("r", FinishReason.CANCELLED))
    assert rig.scheduler.kv_usage == 0
    assert not rig.has_work


def test_cancelling_in_flight_frees_the_blocks_at_the_commit() -> None:
    rig = a_rig(num_stages=2, prefill_chunk=4)
    rig.submit(a_request("r", num_prompt=8, max_tokens=50))
    assert len(fill(rig)) == 2
    assert len(rig.tell(rig.scheduler.intake.abort("r", FinishReason.CANCELLED))) == 1
    assert rig.scheduler.num_running == 0
    rig.commit_one()
    assert rig.scheduler.kv_usage > 0, "the second chunk is still being written"
    assert rig.commit_one() == []
    assert rig.scheduler.kv_usage == 0
    assert not rig.has_work


def test_cancelling_twice_or_for_nobody_is_nothing() -> None:
    rig = a_rig()
    rig.submit(a_request("r"))
    fill(rig)
    assert len(rig.scheduler.intake.abort("r", FinishReason.CANCELLED)) == 1
    assert rig.scheduler.intake.abort("r", FinishReason.CANCELLED) == []
    assert rig.scheduler.intake.abort("nobody", FinishReason.CANCELLED) == []


def test_room_that_an_end_makes_is_used_in_the_next_step() -> None:
    rig = a_rig(max_num_seqs=1)
    rig.submit(a_request("first", max_tokens=50))
    rig.submit(a_request("second"))
    fill(rig)
    rig.commit_one()
    rig.tell(rig.scheduler.intake.abort("first", FinishReason.CANCELLED))
    (plan,) = fill(rig)
    assert [s.sequence_id for s in plan.slices] == [1]


def test_half_scored_prompts_are_not_delivered() -> None:
    rig = a_rig(prefill_chunk=4)
    rig.submit(a_request("r", num_prompt=12, output=OutputOptions(prompt_logprobs=0)))
    fill(rig)
    rig.commit_one()
    (event,) = rig.tell(rig.scheduler.intake.abort("r", FinishReason.CANCELLED))
    assert event.prompt_logprobs == ()


def test_block_sizes_must_agree() -> None:
    rig = a_rig(block_size=4)
    with pytest.raises(ValueError, match="block_size"):
        Scheduler(SchedulerConfig(2, block_size=8), rig.blocks, rig.steps)
