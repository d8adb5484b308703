"""The events of a sequence: tokens, scores, one end, and nothing after it."""

from __future__ import annotations

import math

import pytest

from ppserve.core.plan import Scored, StepResult, TokenLogprobs
from ppserve.core.request import FinishReason, OutputOptions, SamplingParams, StopConditions
from ppserve.errors import RequestFailed
from tests.core.scheduling.rig import a_request, a_rig
from tests.simulated_stage import STAMPS, expected_answer, mix


def test_every_kind_of_end_and_nothing_is_scheduled_after_it() -> None:
    rig = a_rig(num_blocks=2000)
    for seed in range(30):
        stop = StopConditions(12, min_tokens=seed % 3, stop_token_ids=(3, 4))
        sampling = SamplingParams(seed=seed)
        length_end = FinishReason.CONTEXT_LENGTH if seed > 14 else FinishReason.MAX_TOKENS
        rig.submit(a_request(f"r{seed}", sampling=sampling, stop=stop, length_end=length_end))
    rig.finish()
    ends = {str(events[-1].finish) for events in rig.events.values()}
    assert ends == {"EOS", "STOP_TOKEN", "MAX_TOKENS", "CONTEXT_LENGTH"}
    needed = sum(6 + len(expected_answer(request).token_ids) - 1 for request in rig.requests.values())
    assert sum(plan.num_tokens for plan in rig.pipeline.plans) == needed


def test_output_that_is_not_finite_ends_all_answers_of_its_request_and_no_other() -> None:
    rig = a_rig(num_stages=2)
    rig.submit(a_request("bad", num_prompt=9, max_tokens=50, num_sequences=3))
    rig.submit(a_request("good", max_tokens=9))
    while len(rig.events) < 4:
        rig.turn()
    rig.pipeline.not_finite.add(1)
    rig.drain()
    ends = [rig.events["bad", i][-1] for i in range(3)]
    assert [(type(end.error), end.finish) for end in ends] == [(RequestFailed, None)] * 3
    assert rig.events["good", 0][-1].finish is FinishReason.MAX_TOKENS
    assert len(rig.pipeline.plans) < 20
    # Its blocks are not shared with an equal request.
    rig.submit(a_request("again", num_prompt=9, salt=mix(*b"bad")))
    rig.drain()
    assert rig.events["again", 0][0].cached_tokens == 0


# ---- scoring ----


def test_an_error_brings_no_scores() -> None:
    rig = a_rig(num_stages=1)
    rig.submit(a_request("r", num_prompt=3, output=OutputOptions(prompt_logprobs=0)))
    rig.pipeline.not_finite.add(0)
    (event,) = rig.turn()
    assert isinstance(event.error, RequestFailed)
    assert event.prompt_logprobs == ()


@pytest.mark.parametrize("logprobs", [(), (-1.0,), (-1.0, math.nan), (-1.0, -math.inf)])
def test_a_result_without_its_token_or_finite_scores_fails_the_request(logprobs: tuple[float, ...]) -> None:
    rig = a_rig(num_stages=1)
    rig.submit(a_request("score", num_prompt=3, max_tokens=0, output=OutputOptions(prompt_logprobs=0)))
    rig.submit(a_request("draw"))
    plan = rig.request_queue.schedule(rig.scheduler, 0.0)
    assert plan is not None
    scored = Scored(0, tuple(map(TokenLogprobs, logprobs)))
    result = StepResult(epoch=plan.epoch, step_id=plan.step_id, stage=0, stamps=STAMPS, scored=(scored,))
    events = rig.request_queue.commit(rig.scheduler, result, 0.0)
    assert [type(event.error) for event in events] == [RequestFailed, RequestFailed]
    assert not rig.has_work


@pytest.mark.parametrize("finish", [FinishReason.MAX_TOKENS, FinishReason.EOS])
def test_a_stop_string_that_ends_on_the_last_token_is_what_ends_the_answer(finish: FinishReason) -> None:
    """What ends an answer is decided once, where its token is committed."""
    rig = a_rig()
    stop = StopConditions(500 if finish is FinishReason.EOS else 4)
    request = next(r for i in range(99) if expected_answer(r := a_request(f"r{i}", stop=stop)).finish is finish)
    num_tokens = len(expected_answer(request).token_ids)
    rig.submit(request)
    while len(rig.events[request.id, 0]) < num_tokens - 1:
        rig.turn()
    rig.stop(request.id, 0)
    rig.drain()
    end = rig.events[request.id, 0][-1]
    assert (end.finish, end.offset) == (FinishReason.STOP_STRING, num_tokens - 1)
    assert end.token_id == expected_answer(request).token_ids[-1]
