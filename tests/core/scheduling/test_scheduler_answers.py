"""What a stream is told: tokens, ends, scores; and nothing after an end."""

from __future__ import annotations

import pytest

from ppserve.core.plan import StepResult
from ppserve.core.request import FinishReason, OutputOptions, SamplingParams, StopConditions
from ppserve.errors import RequestFailed
from tests.core.scheduling.house import a_house, a_request, fill
from tests.core.toy_pipeline import EOS_ID, STAMPS, expected_answer, mix


def test_every_kind_of_end() -> None:
    house = a_house(num_blocks=2000)
    seeds = range(30)
    for seed in seeds:
        stop = StopConditions(12, min_tokens=seed % 3, stop_token_ids=(3, 4))
        sampling = SamplingParams(seed=seed)
        house.submit(a_request(f"r{seed}", sampling=sampling, stop=stop, limited_by_context=seed > 14))
    house.drain()
    house.check_answers()
    ends = {events[-1].finish for events in house.events.values()}
    assert ends == {
        FinishReason.EOS,
        FinishReason.STOP_TOKEN,
        FinishReason.MAX_TOKENS,
        FinishReason.CONTEXT_LENGTH,
    }


def test_the_matched_token_is_in_the_last_event() -> None:
    house = a_house(num_blocks=2000)
    for seed in range(30):
        house.submit(a_request(f"r{seed}", sampling=SamplingParams(seed=seed), stop=StopConditions(50)))
    house.drain()
    by_eos = [events[-1] for events in house.events.values() if events[-1].finish is FinishReason.EOS]
    assert by_eos
    assert all(event.token_id == EOS_ID for event in by_eos)


def test_nothing_is_scheduled_after_an_end() -> None:
    house = a_house(num_stages=2, num_blocks=2000)
    for seed in range(20):
        house.submit(a_request(f"r{seed}", sampling=SamplingParams(seed=seed), stop=StopConditions(50)))
    house.drain()
    computed = sum(plan.num_tokens for plan in house.pipeline.plans)
    needed = sum(6 + len(expected_answer(r).token_ids) - 1 for r in house.requests.values())
    assert computed == needed


def test_the_engine_may_end_a_sequence_itself() -> None:
    house = a_house(num_stages=2)
    house.submit(a_request("r", max_tokens=50))
    house.submit(a_request("other", max_tokens=9))
    fill(house)
    for event in house.commit_one():
        if event.request_id == "r":
            house.scheduler.finish(event.sequence_id, FinishReason.STOP_STRING, 0.0)
            house.ended_by_engine.add(("r", 0))
    house.scheduler.check_invariants()
    house.drain()
    house.check_answers()
    assert ("r", 0) in house.ended_by_engine
    assert len(house.events["r", 0]) == 1


def test_output_that_is_not_finite_fails_only_its_request() -> None:
    house = a_house(num_stages=2)
    house.submit(a_request("good"))
    house.submit(a_request("bad", num_prompt=9))
    house.pipeline.not_finite.add(1)
    house.drain()
    (event,) = house.events["bad", 0]
    assert isinstance(event.error, RequestFailed)
    assert event.finish is None
    assert house.events["good", 0][-1].finish is FinishReason.MAX_TOKENS
    # What it computed is not shared with the next of its kind.
    house.submit(a_request("again", num_prompt=9, salt=mix(*b"bad")))
    house.drain()
    assert house.events["again", 0][0].cached_tokens == 0


def test_a_result_without_the_promised_token_or_score_fails_the_request() -> None:
    house = a_house(num_stages=1)
    house.submit(a_request("draw"))
    house.submit(a_request("score", output=OutputOptions(prompt_logprobs=0)))
    plan = house.scheduler.schedule(0.0)
    assert plan is not None
    events = house.scheduler.commit(StepResult(plan.epoch, plan.step_id, 0, STAMPS), 0.0)
    assert [type(e.error) for e in events] == [RequestFailed, RequestFailed]
    assert not house.scheduler.has_work


# ---- scoring ----


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("prefill_chunk", [1, 4, None])
def test_a_prompt_is_scored_whole_however_it_was_chunked(max_tokens: int, prefill_chunk: int | None) -> None:
    house = a_house(prefill_chunk=prefill_chunk)
    house.submit(a_request("r", num_prompt=11, max_tokens=max_tokens, output=OutputOptions(prompt_logprobs=1)))
    house.drain()
    house.check_answers()
    first = house.events["r", 0][0]
    assert len(first.prompt_logprobs) == 10
    assert all(event.prompt_logprobs == () for event in house.events["r", 0][1:])


def test_scoring_only_ends_without_a_token_and_without_a_draw() -> None:
    house = a_house()
    house.submit(a_request("r", num_prompt=11, max_tokens=0, output=OutputOptions(prompt_logprobs=1)))
    house.drain()
    (event,) = house.events["r", 0]
    assert (event.token_id, event.finish, event.offset) == (None, FinishReason.MAX_TOKENS, 0)
    assert all(s.draw is None for plan in house.pipeline.plans for s in plan.slices)


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    house = a_house()
    house.submit(a_request("r", num_prompt=1, max_tokens=2, output=OutputOptions(prompt_logprobs=1)))
    house.drain()
    house.check_answers()


def test_a_scored_prompt_is_not_taken_from_the_cache() -> None:
    house = a_house()
    house.submit(a_request("first", num_prompt=20, salt=1))
    house.drain()
    house.submit(a_request("second", num_prompt=20, salt=1, output=OutputOptions(prompt_logprobs=0)))
    house.submit(a_request("control", num_prompt=20, salt=1))
    house.drain()
    house.check_answers()
    assert house.events["second", 0][0].cached_tokens == 0
    assert house.events["control", 0][0].cached_tokens == 16
