"""What a reader takes from a stream: merged when it is slow, complete in any case, and in order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from ppserve.core.plan import TokenLogprobs
from ppserve.core.request import FinishReason, OutputOptions, Request, StopConditions
from ppserve.errors import StagesLost
from ppserve.head.api.stream import Delta, RequestStream
from ppserve.head.engine.streams import TokenOutput

T = TypeVar("T")
END = FinishReason.MAX_TOKENS


def a_request(**fields: object) -> Request:
    return Request("r", (1, 2, 3), StopConditions(max_tokens=10), **fields)


def a_token(offset: int, index: int = 0, finish: FinishReason | None = None, **more: object) -> TokenOutput:
    return TokenOutput(index, offset, 97 + offset, chr(97 + offset), finish=finish, **more)


def read(request: Request, scenario: Callable[[RequestStream], Awaitable[T]], echo: str = "") -> T:
    async def main() -> T:
        async with asyncio.timeout(20):
            return await scenario(RequestStream(request, echo))

    return asyncio.run(main())


async def all_of(stream: RequestStream) -> list[Delta]:
    return [delta async for delta in stream.deltas()]


def test_a_reader_that_keeps_up_sees_every_token() -> None:
    async def scenario(stream: RequestStream) -> list[Delta]:
        deltas, reader = [], stream.deltas()
        for offset in range(3):
            stream.push([a_token(offset, finish=END if offset == 2 else None)])
            deltas.append(await anext(reader))
        assert [delta async for delta in reader] == []
        assert stream.is_complete
        return deltas

    deltas = read(a_request(), scenario)
    assert [(d.offset, d.tokens, d.text, d.num_generated) for d in deltas] == [
        (0, ((97, None),), "a", 1), (1, ((98, None),), "b", 2), (2, ((99, None),), "c", 3),
    ]  # fmt: skip
    assert [d.is_first for d in deltas] == [True, False, False]
    assert [d.last.finish for d in deltas] == [None, None, END]


def test_what_a_slow_reader_left_is_merged_for_each_sequence() -> None:
    async def scenario(stream: RequestStream) -> list[Delta]:
        for offset in range(4):
            finish = END if offset == 3 else None
            stream.push([a_token(offset, index, finish, logprobs=TokenLogprobs(-offset)) for index in (0, 1)])
        return await all_of(stream)

    deltas = read(a_request(num_sequences=2), scenario)
    assert [(d.index, d.offset, d.text) for d in deltas] == [(0, 0, "abcd"), (1, 0, "abcd")]
    for delta in deltas:
        assert delta.tokens == tuple((97 + i, TokenLogprobs(-i)) for i in range(4))
        assert (delta.is_first, delta.last.finish, delta.num_generated) == (True, END, 4)


def test_what_comes_while_others_are_read_joins_the_next_delta() -> None:
    async def scenario(stream: RequestStream) -> list[str]:
        texts, reader = [], stream.deltas()
        stream.push([a_token(0, 0), a_token(0, 1)])
        texts.append((await anext(reader)).text)
        stream.push([a_token(1, 0, END), a_token(1, 1, END)])
        return texts + [delta.text async for delta in reader]

    assert read(a_request(num_sequences=2), scenario) == ["a", "ab", "b"]


def test_an_interval_holds_for_all_but_the_first_and_the_last() -> None:
    async def scenario(stream: RequestStream) -> list[Delta]:
        async def push() -> None:
            for offset in range(9):
                stream.push([a_token(offset, finish=END if offset == 8 else None)])
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            reading = group.create_task(all_of(stream))
            group.create_task(push())
        return reading.result()

    deltas = read(a_request(output=OutputOptions(stream_interval=3)), scenario)
    assert [len(d.tokens) for d in deltas] == [1, 3, 3, 2]


def test_echo_and_prompt_scores_come_once() -> None:
    async def scenario(stream: RequestStream) -> list[Delta]:
        stream.push([a_token(0, 0, prompt_logprobs=(TokenLogprobs(-2), TokenLogprobs(-3))), a_token(0, 1)])
        reader = stream.deltas()
        deltas = [await anext(reader), await anext(reader)]
        stream.push([a_token(1, 0, END), a_token(1, 1, END)])
        return deltas + [delta async for delta in reader]

    deltas = read(a_request(num_sequences=2, output=OutputOptions(prompt_logprobs=0)), scenario, echo="say ")
    assert [d.text for d in deltas] == ["say a", "say a", "b", "b"]
    assert [d.prompt_scores for d in deltas] == [(None, TokenLogprobs(-2), TokenLogprobs(-3)), (), (), ()]


def test_a_sequence_that_ends_before_its_prompt_is_scored_has_no_scores() -> None:
    async def scenario(stream: RequestStream) -> list[Delta]:
        stream.push([TokenOutput(0, 0, finish=FinishReason.CANCELLED)])
        return await all_of(stream)

    (delta,) = read(a_request(output=OutputOptions(prompt_logprobs=0)), scenario)
    assert (delta.tokens, delta.num_generated, delta.prompt_scores) == ((), 0, ())


def test_a_resumed_request_has_one_sequence() -> None:
    async def scenario(stream: RequestStream) -> list[Delta]:
        stream.push([a_token(5, 0), a_token(5, 2, END)])
        return await all_of(stream)

    (delta,) = read(a_request(resume_index=2, resume_ids=(1,) * 5), scenario)
    assert (delta.index, delta.offset, delta.num_generated, delta.is_first) == (2, 5, 6, True)


@pytest.mark.parametrize("by_the_engine", [True, False])
def test_an_error_comes_after_what_was_generated(by_the_engine: bool) -> None:
    error = StagesLost("stage 1 is gone")

    async def scenario(stream: RequestStream) -> list[str]:
        stream.push([a_token(0), a_token(1)])
        if by_the_engine:
            stream.push([TokenOutput(0, 0, error=error)])
        else:
            stream.fail(error)
        reader = stream.deltas()
        texts = [(await anext(reader)).text]
        with pytest.raises(StagesLost):
            await anext(reader)
        assert not stream.is_complete
        return texts

    assert read(a_request(output=OutputOptions(stream_interval=9)), scenario) == ["ab"]


def test_the_first_error_is_told_and_a_finished_sequence_outlives_it() -> None:
    async def scenario(stream: RequestStream) -> None:
        stream.push([a_token(0, 0, END)])
        stream.fail(StagesLost("first"))
        stream.fail(StagesLost("second"))
        reader = stream.deltas()
        assert (await anext(reader)).last.finish is END
        with pytest.raises(StagesLost, match="first"):
            await anext(reader)

    read(a_request(num_sequences=2), scenario)


def test_no_sequence_begins_before_the_prompt_s_scores() -> None:
    async def scenario(stream: RequestStream) -> list[Delta]:
        stream.push([a_token(0, index=1), a_token(1, index=1, finish=END)])
        reader = stream.deltas()
        waiting = asyncio.ensure_future(anext(reader))
        await asyncio.sleep(0)
        assert not waiting.done()
        scores = (TokenLogprobs(-1.0), TokenLogprobs(-2.0))
        stream.push([a_token(0, prompt_logprobs=scores, finish=END)])
        return [await waiting, *[delta async for delta in reader]]

    request = a_request(num_sequences=2, output=OutputOptions(prompt_logprobs=0))
    first, second = read(request, scenario)
    assert (first.index, len(first.prompt_scores)) == (0, 3)
    assert (second.index, len(second.tokens)) == (1, 2)


def test_an_error_does_not_wait_for_the_prompt_s_scores() -> None:
    async def scenario(stream: RequestStream) -> int:
        stream.push([a_token(0, index=1)])
        stream.fail(StagesLost("gone"))
        reader = stream.deltas()
        first = await anext(reader)
        with pytest.raises(StagesLost):
            await anext(reader)
        return first.index

    request = a_request(num_sequences=2, output=OutputOptions(prompt_logprobs=0))
    assert read(request, scenario) == 1
