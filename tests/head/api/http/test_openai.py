"""The client that most people have, openai-python, as it is, against a server with an engine without a model."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from ppserve.core.request import FinishReason
from ppserve.errors import Overloaded, StagesLost
from ppserve.head.engine.streams import TokenOutput
from tests.head.api.http.asking import Served

HELLO: Any = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("top_logprobs", [None, 0, 2])
async def test_its_stream_helper_makes_of_a_stream_the_whole_answer(
    served: Served, n: int, top_logprobs: int | None
) -> None:
    asked: dict[str, Any] = {"model": "fake", "messages": HELLO, "seed": 3, "max_completion_tokens": 6, "n": n}
    if top_logprobs is not None:
        asked |= {"logprobs": True, "top_logprobs": top_logprobs}
    usage: Any = {"include_usage": True}
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none") as client:
        whole = await client.chat.completions.create(**asked)
        async with client.chat.completions.stream(**asked, stream_options=usage) as stream:
            chunks = [event.chunk async for event in stream if event.type == "chunk"]
            final = stream.current_completion_snapshot  # `get_final_completion` raises for answers cut short
    told = [choice.model_dump(exclude_none=True) for choice in whole.choices]
    assert [choice.model_dump(exclude_none=True) for choice in final.choices] == told
    assert all(len(choice["logprobs"]["content"]) == 6 for choice in told if top_logprobs is not None)
    assert final.usage == whole.usage
    assert [choice.index for chunk in chunks[:n] for choice in chunk.choices] == list(range(n))
    for chunk in chunks[:n]:
        (choice,) = chunk.choices
        assert choice.delta.to_dict() == {"role": "assistant", "content": ""}
        assert (choice.logprobs, choice.finish_reason) == (None, None)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("logprobs", [None, 2])
async def test_a_streamed_completion_adds_up_to_the_whole_one(
    served: Served, n: int, logprobs: int | None
) -> None:
    asked: Any = {"model": "fake", "prompt": "a\u2028b", "seed": 3, "max_tokens": 6, "n": n, "echo": True}
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none") as client:
        whole = await client.completions.create(**asked, logprobs=logprobs)
        stream = await client.completions.create(**asked, logprobs=logprobs, stream=True)
        parts = [choice async for chunk in stream for choice in chunk.choices]
    for choice in whole.choices:
        mine = [part for part in parts if part.index == choice.index]
        assert "".join(part.text for part in mine) == choice.text
        assert (mine[-1].finish_reason, {part.finish_reason for part in mine[:-1]}) == ("length", {None})
        assert (choice.logprobs is None) == (logprobs is None)
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset") if choice.logprobs else ():
            added = [value for part in mine for value in getattr(part.logprobs, name)]
            assert added == getattr(choice.logprobs, name), name


async def test_the_answer_s_end_comes_in_any_order_of_choices(served: Served) -> None:
    """The helper numbers choices in the order in which it first sees them."""
    served.engine.by_hand = True
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none") as client:
        opening = client.chat.completions.stream(model="fake", messages=HELLO, n=3)

        async def read() -> list[str | None]:
            async with opening as stream:
                return [choice.message.content for choice in (await stream.get_final_completion()).choices]

        reading = asyncio.create_task(read())
        await served.engine.until(lambda engine: bool(engine.sinks))
        (sink,) = served.engine.sinks.values()
        for index in (2, 0, 1):
            sink([TokenOutput(index, 0, 65, "abc"[index], finish=FinishReason.EOS)])
            await asyncio.sleep(0)
        assert await reading == ["a", "b", "c"]


async def test_no_character_ends_a_line_of_a_stream(served: Served) -> None:
    """Other readers split it as `str.splitlines` does: httpx's `iter_lines` among them."""
    text = "a".join(map(chr, [*range(0x20), 0x7F, 0x85, 0xA0, 0x2028, 0x2029, 0x1F600]))
    served.engine.by_hand = True
    for stream in (False, True):
        body = {"prompt": "a", "stream": stream}
        asking = asyncio.create_task(served.ask("/v1/completions", body))
        await served.engine.until(lambda engine: bool(engine.sinks))
        _, sink = served.engine.sinks.popitem()
        sink([TokenOutput(0, 0, 65, text, finish=FinishReason.EOS)])
        answer = (await asking).body.decode()
        lines = [line.removeprefix("data: ") for line in answer.splitlines() if line]
        (said,) = map(json.loads, lines[:1])
        assert said["choices"][0]["text"] == text
        assert lines[1:] == ["[DONE]"] * stream


async def test_errors_are_its_classes(served: Served) -> None:
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.completions.create(model="fake", prompt="a", top_p=7)
        assert (wrong.value.param, wrong.value.code, wrong.value.type) == (
            "top_p", "invalid_request", "invalid_request_error",
        )  # fmt: skip
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="gpt-4", prompt="a")
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="fake", input="a")
        served.engine.refusal = Overloaded("the queue is full", 0.01)
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model="fake", prompt="a")
        served.engine.refusal = StagesLost("stage 1 is gone")
        with pytest.raises(openai.InternalServerError):
            await client.completions.create(model="fake", prompt="a")
        assert set(served.counted.values()) == {1}, "something was asked again"
