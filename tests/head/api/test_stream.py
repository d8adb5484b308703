"""What a reader takes from a stream: merged when it is slow, complete in any case, and in order."""

from __future__ import annotations

import asyncio

import pytest

from ppserve.core.plan import TokenLogprobs
from ppserve.core.request import FinishReason, OutputOptions, Request, StopConditions
from ppserve.errors import StagesLost
from ppserve.head.api.stream import Delta, RequestStream, deltas_of
from ppserve.head.engine.streams import TokenOutput

END = FinishReason.MAX_TOKENS
SCORED = OutputOptions(prompt_logprobs=0)
SCORES = (TokenLogprobs(-2), TokenLogprobs(-3))


def a_request(**fields: object) -> Request:
    return Request("r", (1, 2, 3), StopConditions(max_tokens=10), **fields)


def a_token(offset: int, index: int = 0, finish: FinishReason | None = None, **more: object) -> TokenOutput:
    return TokenOutput(index, offset, 97 + offset, chr(97 + offset), finish=finish, **more)


def popped(pending: RequestStream, *outputs: TokenOutput) -> list[Delta]:
    """What is due after these outputs."""
    pending.push(outputs)
    return list(pending.pop_deltas())


def test_a_reader_that_keeps_up_sees_every_token() -> None:
    pending = RequestStream(a_request(), "")
    deltas = [delta for i in range(3) for delta in popped(pending, a_token(i, finish=END if i == 2 else None))]
    assert pending.is_complete
    assert [(d.offset, d.tokens, d.text, d.num_generated) for d in deltas] == [
        (0, ((97, None),), "a", 1), (1, ((98, None),), "b", 2), (2, ((99, None),), "c", 3),
    ]  # fmt: skip
    assert [d.is_first for d in deltas] == [True, False, False]
    assert [d.last.finish for d in deltas] == [None, None, END]


async def test_a_reader_in_the_event_loop_is_woken_until_the_end_and_by_an_error() -> None:
    async def all_of(stream: RequestStream) -> list[str]:
        return [delta.text async for _, delta in deltas_of([stream])]

    streams = [RequestStream(a_request(), "") for _ in "ab"]
    async with asyncio.timeout(20):
        reading = [asyncio.ensure_future(all_of(stream)) for stream in streams]
        for offset in range(3):
            await asyncio.sleep(0)
            streams[0].push([a_token(offset, finish=END if offset == 2 else None)])
        streams[1].fail(StagesLost("gone"))
        assert await reading[0] == ["a", "b", "c"]
        with pytest.raises(StagesLost):
            await reading[1]


def test_what_a_slow_reader_left_is_merged_for_each_sequence() -> None:
    pending = RequestStream(a_request(num_sequences=2), "")
    for offset in range(4):
        finish = END if offset == 3 else None
        pending.push([a_token(offset, index, finish, logprobs=TokenLogprobs(-offset)) for index in (0, 1)])
    deltas = popped(pending)
    assert [(d.index, d.offset, d.text) for d in deltas] == [(0, 0, "abcd"), (1, 0, "abcd")]
    for delta in deltas:
        assert delta.tokens == tuple((97 + i, TokenLogprobs(-i)) for i in range(4))
        assert (delta.is_first, delta.last.finish, delta.num_generated) == (True, END, 4)


def test_what_comes_while_others_are_read_joins_the_next_delta() -> None:
    pending = RequestStream(a_request(num_sequences=2), "")
    pending.push([a_token(0, 0), a_token(0, 1)])
    reading = pending.pop_deltas()
    texts = [next(reading).text]
    pending.push([a_token(1, 0, END), a_token(1, 1, END)])
    assert texts + [d.text for d in reading] + [d.text for d in popped(pending)] == ["a", "ab", "b"]


def test_an_interval_holds_for_all_but_the_first_and_the_last() -> None:
    pending = RequestStream(a_request(output=OutputOptions(stream_interval=3)), "")
    deltas = [delta for i in range(9) for delta in popped(pending, a_token(i, finish=END if i == 8 else None))]
    assert [len(d.tokens) for d in deltas] == [1, 3, 3, 2]


def test_echo_and_prompt_scores_come_once() -> None:
    pending = RequestStream(a_request(num_sequences=2, output=SCORED), "say ")
    deltas = popped(pending, a_token(0, 0, prompt_logprobs=SCORES), a_token(0, 1))
    deltas += popped(pending, a_token(1, 0, END), a_token(1, 1, END))
    assert [d.text for d in deltas] == ["say a", "say a", "b", "b"]
    assert [d.prompt_tokens for d in deltas] == [((1, None), (2, SCORES[0]), (3, SCORES[1])), (), (), ()]


def test_a_sequence_that_ends_before_its_prompt_is_scored_has_no_scores() -> None:
    pending = RequestStream(a_request(output=SCORED), "")
    (delta,) = popped(pending, TokenOutput(0, 0, finish=FinishReason.CANCELLED))
    assert (delta.tokens, delta.num_generated, delta.prompt_tokens) == ((), 0, ())


def test_a_resumed_request_has_one_sequence() -> None:
    pending = RequestStream(a_request(resume_index=2, resume_ids=(1,) * 5), "")
    (delta,) = popped(pending, a_token(5, 0), a_token(5, 2, END))
    assert (delta.index, delta.offset, delta.num_generated, delta.is_first) == (2, 5, 6, True)


@pytest.mark.parametrize("by_the_engine", [True, False])
def test_an_error_comes_after_what_was_generated(by_the_engine: bool) -> None:
    """It waits neither for the interval's end nor for the prompt's scores."""
    error = StagesLost("stage 1 is gone")
    options = OutputOptions(stream_interval=9, prompt_logprobs=0)
    pending = RequestStream(a_request(num_sequences=2, output=options), "")
    pending.push([a_token(0, index=1), a_token(1, index=1)])
    if by_the_engine:
        pending.push([TokenOutput(0, 0, error=error)])
    else:
        pending.fail(error)
    reading = pending.pop_deltas()
    first = next(reading)
    assert (first.index, first.text) == (1, "ab")
    with pytest.raises(StagesLost):
        next(reading)
    assert not pending.is_complete


def test_the_first_error_is_told_and_a_finished_sequence_outlives_it() -> None:
    pending = RequestStream(a_request(num_sequences=2), "")
    pending.push([a_token(0, 0, END)])
    pending.fail(StagesLost("first"))
    pending.fail(StagesLost("second"))
    reading = pending.pop_deltas()
    assert next(reading).last.finish is END
    with pytest.raises(StagesLost, match="first"):
        next(reading)


def test_no_sequence_begins_before_the_prompt_s_scores() -> None:
    pending = RequestStream(a_request(num_sequences=2, output=SCORED), "")
    assert popped(pending, a_token(0, index=1), a_token(1, index=1, finish=END)) == []
    first, second = popped(pending, a_token(0, prompt_logprobs=SCORES, finish=END))
    assert (first.index, len(first.prompt_tokens)) == (0, 3)
    assert (second.index, len(second.tokens)) == (1, 2)
