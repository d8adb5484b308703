"""Admission: requests that are admitted, refused, cancelled or late; freed blocks are used at once."""

from __future__ import annotations

import math
import random
from collections import deque

import pytest

from ppserve.core.request import FinishReason, OutputOptions
from ppserve.core.scheduling.throughput import HALF_LIFE_S, Throughput
from ppserve.errors import DeadlinePassed, InvalidRequest, Overloaded
from tests.core.scheduling.rig import SchedulerRig, a_request, a_rig, fill

# ---- requests that could never run ----


@pytest.mark.parametrize(
    "fields", [{"num_prompt": 40, "max_tokens": 42}, {"num_prompt": 10, "max_tokens": 30, "num_sequences": 4}]
)
def test_what_can_never_run_is_refused(fields: dict[str, int]) -> None:
    """The first needs one position more than there is."""
    rig = a_rig(num_blocks=20, max_model_len=128)
    with pytest.raises(InvalidRequest, match=r"stop\.max_tokens: needs [0-9]+ KV blocks, the server has 20"):
        rig.submit(a_request("r", **fields))  # type: ignore[arg-type]
    assert not rig.has_work


# ---- the queue ----


@pytest.mark.parametrize("num_prompt", [1, 7, 8, 9])
@pytest.mark.parametrize("num_sequences", [1, 3])
def test_a_request_is_refused_where_it_needs_a_block_more_than_there_are(
    num_prompt: int, num_sequences: int
) -> None:
    """Each answer takes the blocks of all its positions, and shares those that the prompt fills before its last
    token."""
    request = a_request("r", num_prompt=num_prompt, max_tokens=10, num_sequences=num_sequences)
    num_shared = (num_prompt - 1) // 4 if num_sequences > 1 else 0
    needed = num_shared + num_sequences * (math.ceil((num_prompt + 9) / 4) - num_shared)
    with pytest.raises(InvalidRequest, match=f"needs {needed} KV blocks, the server has {needed - 1}"):
        a_rig(num_blocks=needed - 1).submit(request)
    rig = a_rig(num_blocks=needed)
    rig.submit(request)
    assert rig.scheduler.kv_usage == 1.0
    rig.finish()


def test_worst_case_blocks_are_reserved_so_no_running_request_loses_its_place() -> None:
    rig = a_rig(num_blocks=10, block_size=4, prefix_cache=False)
    for i in range(4):
        rig.submit(a_request(f"r{i}", num_prompt=5, max_tokens=12))
    assert rig.scheduler.num_running == 2
    assert rig.request_queue.num_waiting == 2
    rig.finish()
    steps_of: dict[int, list[int]] = {}
    for plan in rig.pipeline.plans:
        for slice_ in plan.slices:
            steps_of.setdefault(slice_.sequence_id, []).append(slice_.start)
    assert all(starts == sorted(set(starts)) for starts in steps_of.values()), "nothing was computed twice"


@pytest.mark.parametrize(
    ("limits", "num_running", "num_waiting"),
    [({"max_num_seqs": 2, "max_queue": 3}, 2, 3), ({"max_num_seqs": 1, "max_queue_tokens": 40}, 1, 2)],
)
def test_the_queue_is_bounded_by_requests_that_wait(
    limits: dict[str, int], num_running: int, num_waiting: int
) -> None:
    rig = a_rig(**limits)  # type: ignore[arg-type]
    request_queue = rig.request_queue
    for i in range(num_running + num_waiting):
        request_queue.submit(a_request(f"r{i}", num_prompt=10, max_tokens=10), 0.0)
    with pytest.raises(Overloaded) as refusal:
        request_queue.submit(a_request("one more", num_prompt=10, max_tokens=10), 0.0)
    assert refusal.value.retry_after_s > 0
    assert (rig.scheduler.num_running, request_queue.num_waiting) == (num_running, num_waiting)
    rig.check()


def test_requests_that_a_lost_stage_gave_back_fill_the_queue_too() -> None:
    rig = a_rig(max_num_seqs=2, max_queue=9, max_queue_tokens=60)
    for name in ("a", "b"):
        rig.submit(a_request(name, num_prompt=10, max_tokens=10))
    fill(rig)
    rig.lose()
    assert rig.submit(a_request("c", num_prompt=10, max_tokens=10))
    assert not rig.submit(a_request("d", num_prompt=1, max_tokens=1)), "60 tokens wait"
    rig.form()
    rig.finish()


def test_a_light_caller_beside_a_hundred_greedy_ones_waits_for_one_free_place() -> None:
    """They fill every place and the queue all the time. The light one waits for a place in the queue, then for one
    that becomes free."""
    rig = a_rig(num_stages=1, max_num_seqs=16, max_queue=200, num_blocks=4000)
    num_places_freed, begun, waited, sent, num_ended = [], 0, 0, 0, 0
    for _ in range(600):
        light = f"light{len(num_places_freed)}"
        if light not in rig.requests and rig.submit(a_request(light, max_tokens=3, caller="light")):
            begun = num_ended
        while rig.submit(a_request(f"greedy{sent}", max_tokens=60, caller=f"greedy{sent % 100}")):
            sent += 1
        sent += 1  # the next caller's turn
        if fill(rig):
            events = rig.commit_one()
            for event in events:
                if event.request_id == light:
                    waited = num_ended - begun if event.offset == 0 else waited
                    num_places_freed += [waited] * event.is_terminal
            num_ended += sum(event.is_terminal for event in events)
    assert len(num_places_freed) > 5
    assert max(num_places_freed) <= 16, "all places that became free in one step"


# ---- cancellation ----


def test_cancelling_in_flight_frees_the_blocks_at_once() -> None:
    """A step of another request that takes them over runs after those that still write them. A half scored prompt
    is not delivered."""
    rig = a_rig(num_stages=2, num_blocks=16, prefill_chunk=4)
    rig.submit(a_request("r", num_prompt=12, max_tokens=50, output=OutputOptions(prompt_logprobs=0)))
    rig.turn()
    fill(rig)
    assert rig.pipeline.num_in_flight == 2
    (event,) = rig.tell(rig.request_queue.abort("r", FinishReason.CANCELLED))
    assert event.prompt_logprobs == ()
    assert (rig.scheduler.num_running, rig.scheduler.kv_usage) == (0, 0.0)
    rig.submit(a_request("next", num_prompt=8, max_tokens=50))
    rig.finish()


# ---- deadlines: requests that would be late are refused, those that are late end ----


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
        rig.request_queue.submit(a_request("hurried", deadline_s=rig.now + 1.0), rig.now)
    with pytest.raises(DeadlinePassed):
        rig.request_queue.submit(a_request("late", deadline_s=rig.now), rig.now)
    assert rig.submit(a_request("patient", deadline_s=rig.now + 10.0))
    assert rig.submit(a_request("important", priority=1, deadline_s=rig.now + 1.0)), "nothing is ahead of it"


def test_old_measurements_of_the_throughput_fade_and_time_without_a_step_is_none() -> None:
    """Both speeds count alike after one half-life at the other."""
    throughput = Throughput()
    throughput.started(0.0)
    now = 0.0
    for _ in range(30):
        now += HALF_LIFE_S
        throughput.committed(1000 * round(HALF_LIFE_S), now, pipeline_empty=False)
    assert throughput.seconds_for(1000) == pytest.approx(1.0)
    now += HALF_LIFE_S
    throughput.committed(200 * round(HALF_LIFE_S), now, pipeline_empty=True)
    assert throughput.seconds_for(600) == pytest.approx(1.0)
    throughput.started(now + 1000.0)
    throughput.committed(600, now + 1001.0, pipeline_empty=True)
    assert throughput.seconds_for(600) == pytest.approx(1.0)
    throughput.request_ended(100, 25)
    assert throughput.seconds_for(2400) == pytest.approx(1.0), "requests use a quarter of what they reserve"


def test_an_answer_that_its_deadline_cut_short_says_nothing_about_the_lengths_of_answers() -> None:
    rig = a_rig(max_num_seqs=1)
    throughput = rig.request_queue._throughput
    rig.submit(a_request("late", max_tokens=50, deadline_s=3.0))
    rig.turn()
    rig.now = 2.9
    assert rig.request_queue.expire(rig.now) == []
    rig.now = 3.0
    assert [event.finish for event in rig.tell(rig.request_queue.expire(rig.now))] == [FinishReason.DEADLINE]
    assert throughput._reserved_tokens == 0
    rig.submit(a_request("whole", max_tokens=5))
    rig.drain()
    assert throughput._reserved_tokens == 11


def test_a_caller_is_charged_for_what_it_asked_and_got_once_whatever_is_computed_again() -> None:
    rig = a_rig(num_stages=2)
    rig.submit(a_request("r", num_prompt=9, max_tokens=7, caller="a"))
    for _ in range(2):
        rig.turn()
        rig.turn()
        rig.lose_stage()
    rig.finish()
    assert rig.request_queue.queue._accounts["a"].served == 9 + 7


def test_the_prediction_learns_that_requests_end_before_their_limit() -> None:
    rig = a_rig(max_num_seqs=1, num_blocks=4000, prefix_cache=False)
    for i in range(40):
        rig.submit(a_request(f"r{i}", num_prompt=10, max_tokens=500))
        fill(rig)
        rig.now += 0.1
        rig.stop(f"r{i}", 0)
        (event,) = rig.commit_one()
        assert event.finish is FinishReason.STOP_STRING
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
    assert rig.submit(hurried) == (num_running < 8)
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
        late += len(rig.tell(rig.request_queue.expire(rig.now)))
        while (plan := rig.schedule_one()) is not None:
            rows.append(plan.num_tokens)
        if rows:
            rig.now += 0.004 + 0.0004 * rows.popleft()
            good += sum(event.is_terminal for event in rig.commit_one())
        else:
            rig.now = due_s + 1e-6
    return good, late


@pytest.mark.slow
def test_under_overload_those_who_are_admitted_end_in_time() -> None:
    """Answers cut off by their deadline taught that answers are short, and ever more were admitted."""
    usual, _ = overloaded(a_rig(num_blocks=9000, max_num_seqs=256), 0.8, 100.0, 6.0)
    good, late = overloaded(a_rig(num_blocks=9000, max_num_seqs=256), 10.0, 1.0, 6.0)
    assert good >= 0.9 * usual
    assert late <= 0.01 * good


@pytest.mark.parametrize("num_greedy", [1, 100])
def test_a_deadline_is_told_by_the_turn_that_a_caller_who_has_nothing_gets(num_greedy: int) -> None:
    """All that others have in the queue does not decide it. Where the request is admitted, it ends in time."""
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
    while "light" in rig.request_queue.groups:
        while (plan := rig.schedule_one()) is not None:
            rig.now += plan.num_tokens / 1000.0
        rig.commit_one()
    assert rig.events["light", 0][-1].finish is FinishReason.MAX_TOKENS


def test_requests_end_at_their_deadline_and_before_they_cost_a_step() -> None:
    rig = a_rig(max_num_seqs=1)
    rig.submit(a_request("runs", max_tokens=50, deadline_s=3.0))
    rig.submit(a_request("waits", deadline_s=2.5))
    for _ in range(3):
        rig.turn()
        rig.now += 1.0
    rig.finish()
    assert rig.events["runs", 0][-1].finish is FinishReason.DEADLINE
    assert len(rig.events["runs", 0]) == 3 + 1
    (event,) = rig.events["waits", 0]
    assert (event.finish, event.token_id, event.admitted_s) == (FinishReason.DEADLINE, None, None)
    assert all(s.sequence_id != event.sequence_id for plan in rig.pipeline.plans for s in plan.slices)


def test_each_deadline_is_kept_whatever_ended_before() -> None:
    rig = a_rig(max_num_seqs=1)
    for name, deadline_s in (("runs", None), ("late", 9.0), ("early", 3.0), ("gone", 2.0), ("later", 9.5)):
        rig.submit(a_request(name, max_tokens=30, deadline_s=deadline_s))
    (event,) = rig.tell(rig.request_queue.abort("gone", FinishReason.CANCELLED))
    assert event.finish is FinishReason.CANCELLED
    for ended in ("gone", "nobody"):
        assert rig.request_queue.abort(ended, FinishReason.CANCELLED) == []
    expire = rig.request_queue.expire
    overdue = {now: [event.request_id for event in expire(now)] for now in (2.5, 3.5, 4.0, 10.0)}
    assert overdue == {2.5: [], 3.5: ["early"], 4.0: [], 10.0: ["late", "later"]}
    assert rig.request_queue.num_waiting == 0
