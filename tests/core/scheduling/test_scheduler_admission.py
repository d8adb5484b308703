"""Admission: requests that are admitted, refused or cancelled; freed blocks are used at once."""

from __future__ import annotations

import pytest

from ppserve.core.request import FinishReason, OutputOptions
from ppserve.errors import InvalidRequest, Overloaded
from tests.core.scheduling.invariants import check_scheduler
from tests.core.scheduling.rig import a_request, a_rig, fill

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
    rig.finish()


def test_what_just_fits_runs() -> None:
    rig = a_rig(num_blocks=10, block_size=4)
    rig.submit(a_request("r", num_prompt=20, max_tokens=21))
    rig.finish()
    with pytest.raises(InvalidRequest):
        rig.submit(a_request("one more", num_prompt=20, max_tokens=22))


# ---- the queue ----


def test_worst_case_blocks_are_reserved_so_no_running_request_loses_its_place() -> None:
    rig = a_rig(num_blocks=10, block_size=4, prefix_cache=False)
    for i in range(4):
        rig.submit(a_request(f"r{i}", num_prompt=5, max_tokens=12))
    assert rig.scheduler.num_running == 2
    assert rig.scheduler.request_queue.num_waiting == 2
    rig.finish()
    steps_of: dict[int, list[int]] = {}
    for plan in rig.pipeline.plans:
        for piece in plan.slices:
            steps_of.setdefault(piece.sequence_id, []).append(piece.start)
    assert all(starts == sorted(set(starts)) for starts in steps_of.values()), "nothing was computed twice"


@pytest.mark.parametrize(
    ("limits", "num_running", "num_waiting"),
    [({"max_num_seqs": 2, "max_queue": 3}, 2, 3), ({"max_num_seqs": 1, "max_queue_tokens": 40}, 1, 2)],
)
def test_the_queue_is_bounded_by_requests_that_wait(
    limits: dict[str, int], num_running: int, num_waiting: int
) -> None:
    rig = a_rig(**limits)  # type: ignore[arg-type]
    request_queue = rig.scheduler.request_queue
    for i in range(num_running + num_waiting):
        request_queue.submit(a_request(f"r{i}", num_prompt=10, max_tokens=10), 0.0)
    with pytest.raises(Overloaded) as refusal:
        request_queue.submit(a_request("one more", num_prompt=10, max_tokens=10), 0.0)
    assert refusal.value.retry_after_s > 0
    assert (rig.scheduler.num_running, request_queue.num_waiting) == (num_running, num_waiting)
    check_scheduler(rig.scheduler)


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


def test_a_refused_request_leaves_nothing_behind() -> None:
    rig = a_rig(max_num_seqs=1, max_queue=0)
    rig.submit(a_request("r"))
    for i in range(50):
        assert not rig.submit(a_request(f"refused{i}", deadline_s=1e9, caller=f"c{i}"))
    check_scheduler(rig.scheduler)
    assert rig.scheduler.request_queue.expire(2e9) == []
    rig.finish()


def test_priority_and_fairness_decide_who_is_next() -> None:
    rig = a_rig(max_num_seqs=1)
    rig.submit(a_request("running", caller="flood"))
    for i in range(5):
        rig.submit(a_request(f"flood{i}", caller="flood"))
    rig.submit(a_request("light", caller="light"))
    rig.submit(a_request("urgent", caller="flood", priority=1))
    rig.drain()
    assert [request for request, _ in rig.events][:3] == ["running", "urgent", "light"]
    assert len(rig.events) == 8


# ---- cancellation ----


def test_cancelling_while_waiting() -> None:
    rig = a_rig(max_num_seqs=1)
    rig.submit(a_request("running"))
    rig.submit(a_request("waiting"))
    (event,) = rig.tell(rig.scheduler.request_queue.abort("waiting", FinishReason.CANCELLED))
    assert event.finish is FinishReason.CANCELLED
    assert rig.scheduler.request_queue.num_waiting == 0
    for ended in ("waiting", "nobody"):
        assert rig.scheduler.request_queue.abort(ended, FinishReason.CANCELLED) == []
    rig.finish()


def test_cancelling_in_flight_frees_the_blocks_at_once() -> None:
    """A step of another request that takes them over runs after those that still write them."""
    rig = a_rig(num_stages=2, num_blocks=16, prefill_chunk=4)
    rig.submit(a_request("r", num_prompt=8, max_tokens=50))
    assert len(fill(rig)) == 2
    assert len(rig.tell(rig.scheduler.request_queue.abort("r", FinishReason.CANCELLED))) == 1
    assert (rig.scheduler.num_running, rig.scheduler.kv_usage) == (0, 0.0)
    rig.submit(a_request("next", num_prompt=8, max_tokens=50))
    rig.finish()


def test_half_scored_prompts_are_not_delivered() -> None:
    rig = a_rig(prefill_chunk=4)
    rig.submit(a_request("r", num_prompt=12, output=OutputOptions(prompt_logprobs=0)))
    rig.turn()
    (event,) = rig.tell(rig.scheduler.request_queue.abort("r", FinishReason.CANCELLED))
    assert event.prompt_logprobs == ()
