"""Deadlines: requests that would be late are refused, those that are late end."""

from __future__ import annotations

import random
from collections import deque

import pytest

from ppserve.core.request import FinishReason
from ppserve.errors import Overloaded
from tests.core.scheduling.rig import SchedulerRig, a_request, a_rig, fill


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
    with pytest.raises(Overloaded, match="longer than its deadline"):
        rig.scheduler.request_queue.submit(a_request("hurried", deadline_s=rig.now + 1.0), rig.now)
    assert rig.submit(a_request("patient", deadline_s=rig.now + 10.0))
    assert rig.submit(a_request("important", priority=1, deadline_s=rig.now + 1.0)), "nothing is ahead of it"


def test_the_prediction_learns_that_requests_end_before_their_limit() -> None:
    rig = a_rig(max_num_seqs=1, num_blocks=4000, prefix_cache=False)
    for i in range(40):
        rig.submit(a_request(f"r{i}", num_prompt=10, max_tokens=500))
        fill(rig)
        rig.now += 0.1
        (event,) = rig.commit_one()
        rig.scheduler.request_queue.abort(event.request_id, FinishReason.STOP_STRING, event.index)
    rig.submit(a_request("running", num_prompt=10, max_tokens=500))
    rig.submit(a_request("waiting", num_prompt=10, max_tokens=500))
    # By max_tokens the request before it would take about 5 s; as measured, it takes a fraction of a second.
    assert rig.submit(a_request("hurried", deadline_s=rig.now + 1.0))


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
            rig.scheduler.request_queue.submit(hurried, rig.now)
    assert rig.submit(a_request("without", num_prompt=1, max_tokens=20))
    rig.drain()


def overloaded(rig: SchedulerRig, times: float, limit_s: float, seconds: float) -> tuple[int, int]:
    """So many times the requests that can be served, each with a time limit: (answers, admitted but late). A step
    takes 4 ms, and 0.4 ms a row."""
    dice, sent, good, late, due_s = random.Random(0), 0, 0, 0, 0.0
    rows: deque[int] = deque()
    while rig.now < seconds:
        while due_s < rig.now:
            due_s += dice.expovariate(50.0 * times)
            sent += 1
            rig.submit(a_request(f"r{sent}", num_prompt=8, max_tokens=24, deadline_s=rig.now + limit_s))
        late += len(rig.scheduler.request_queue.expire(rig.now))
        while (plan := rig.schedule_one()) is not None:
            rows.append(plan.num_tokens)
        if rows:
            rig.now += 0.004 + 0.0004 * rows.popleft()
            good += sum(event.is_terminal for event in rig.commit_one())
        else:
            rig.now = due_s + 1e-6
    return good, late


@pytest.mark.slow
@pytest.mark.parametrize("limit_s", [1.0, 3.0])
def test_under_overload_those_who_are_admitted_end_in_time(limit_s: float) -> None:
    """Answers cut off by their deadline taught that answers are short, and ever more were admitted."""
    usual, _ = overloaded(a_rig(num_blocks=9000, max_num_seqs=256), 0.8, 100.0, 6.0)
    good, late = overloaded(a_rig(num_blocks=9000, max_num_seqs=256), 10.0, limit_s, 6.0)
    assert good >= 0.9 * usual
    assert late <= 0.01 * good


@pytest.mark.parametrize("num_greedy", [1, 100])
def test_a_deadline_is_told_by_the_turn_that_a_caller_who_has_nothing_gets(num_greedy: int) -> None:
    """Not by all that others have in the queue. Where it is admitted, it ends in time."""
    rig = a_rig(num_blocks=9000, max_num_seqs=8, prefix_cache=False)
    measured(rig, tokens_per_s=1000.0)
    for i in range(400):
        assert rig.submit(a_request(f"greedy{i}", num_prompt=20, max_tokens=50, caller=f"greedy{i % num_greedy}"))
    for _ in range(20):
        while (plan := rig.schedule_one()) is not None:
            rig.now += plan.num_tokens / 1000.0
        rig.commit_one()
    light = a_request("light", num_prompt=4, max_tokens=8, caller="light", deadline_s=rig.now + 3.0)
    if num_greedy > 8:  # one each: the light one may have to wait as all others do
        assert not rig.submit(light)
        return
    assert rig.submit(light)
    while "light" in rig.scheduler.request_queue.groups:
        while (plan := rig.schedule_one()) is not None:
            rig.now += plan.num_tokens / 1000.0
        rig.commit_one()
    assert rig.events["light", 0][-1].finish is FinishReason.MAX_TOKENS


def test_overdue_requests_end_before_they_cost_a_step() -> None:
    rig = a_rig(max_num_seqs=1)
    rig.submit(a_request("running", max_tokens=20))
    rig.submit(a_request("late", deadline_s=5.0))
    assert rig.scheduler.request_queue.expire(4.9) == []
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
        rig.turn()
        rig.now += 1.0
    rig.finish()
    assert rig.events["r", 0][-1].finish is FinishReason.DEADLINE
    assert len(rig.events["r", 0]) == 3 + 1


def test_each_deadline_is_kept_whatever_ended_before() -> None:
    rig = a_rig(max_num_seqs=1)
    for name, deadline_s in (("runs", None), ("late", 9.0), ("early", 3.0), ("gone", 2.0), ("later", 9.5)):
        rig.submit(a_request(name, max_tokens=30, deadline_s=deadline_s))
    rig.tell(rig.scheduler.request_queue.abort("gone", FinishReason.CANCELLED))
    expire = rig.scheduler.request_queue.expire
    overdue = {now: [event.request_id for event in expire(now)] for now in (2.5, 3.5, 4.0, 10.0)}
    assert overdue == {2.5: [], 3.5: ["early"], 4.0: [], 10.0: ["late", "later"]}
