"""The client that most people have, openai-python, as it is, against a server with an engine without a model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from ppserve.core.request import Request
from ppserve.errors import DeadlinePassed, Overloaded, RequestError, StagesLost
from ppserve.head.engine.streams import Sink
from tests.fake_engine import FakeEngine
from tests.head.api.http.asking import Served, served_http

Scenario = Callable[[Served, AsyncOpenAI], Awaitable[None]]


@dataclass
class BusyAtFirst(FakeEngine):
    """Refuses as often as it is told, then serves."""

    times: int = 0

    def queue_request(self, request: Request, sink: Sink) -> None:
        self.times -= 1
        if self.times >= 0:
            assert self.refusal is not None
            raise self.refusal
        self.refusal = None
        super().queue_request(request, sink)


def run(scenario: Scenario, engine: FakeEngine | None = None, **client: Any) -> None:
    async def main() -> None:
        async with served_http(engine) as served, client_of(served, **client) as asking:
            await scenario(served, asking)

    asyncio.run(main())


def client_of(served: Served, **settings: Any) -> AsyncOpenAI:
    return AsyncOpenAI(**{"base_url": f"http://127.0.0.1:{served.port}/v1", "api_key": "none", **settings})


def test_the_blocking_client_and_further_fields() -> None:
    async def scenario(served: Served, _: AsyncOpenAI) -> None:
        def ask() -> None:
            with OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none") as client:
                assert [model.id for model in client.models.list()] == ["fake"]
                more = {"top_k": 5, "return_token_ids": True, "min_tokens": 2}
                whole = client.completions.create(model="fake", prompt=[104, 105], max_tokens=3, extra_body=more)
                stream = client.completions.create(model="fake", prompt="hi", max_tokens=9, stream=True)
                assert len(list(stream)) > 3
                extra = whole.choices[0].model_extra
                assert extra is not None
                assert extra["prompt_token_ids"] == [104, 105]
                assert whole.model_extra is not None
                assert isinstance(whole.model_extra["seed"], int)

        await asyncio.to_thread(ask)
        assert served.engine.requests[0].sampling.top_k == 5

    run(scenario)


def test_errors_are_its_classes() -> None:
    async def scenario(served: Served, client: AsyncOpenAI) -> None:
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

    run(scenario, max_retries=0)


def test_an_error_in_mid_stream_raises() -> None:
    async def scenario(served: Served, client: AsyncOpenAI) -> None:
        stream = await client.completions.create(model="fake", prompt="a", max_tokens=6, stream=True)
        reader = aiter(stream)
        await anext(reader)
        with pytest.raises(openai.APIError, match="stage 1 is gone"):
            [chunk async for chunk in reader]

    run(scenario, FakeEngine(break_error=StagesLost("stage 1 is gone"), break_after=3, num_breaks=1))


@pytest.mark.parametrize(
    ("error", "status", "seconds"),
    [(Overloaded("the queue is full", 0.023), 429, "0.023000"), (StagesLost("stage 1 is gone"), 503, "5.000000")],
)
def test_it_comes_back_when_it_was_told_to(
    error: RequestError, status: int, seconds: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(served: Served, client: AsyncOpenAI) -> None:
        asking = asyncio.create_task(client.completions.create(model="fake", prompt="a"))
        while "Retrying request" not in caplog.text:
            await asyncio.sleep(0.01)
        if status == 429:
            await asking
            assert served.counted == {("/v1/completions", 429): 2, ("/v1/completions", 200): 1}
        asking.cancel()

    with caplog.at_level(logging.INFO, "openai"):
        run(scenario, BusyAtFirst(refusal=error, times=2))
    assert f"Retrying request in {seconds} seconds" in caplog.text


def test_it_does_not_come_back_when_that_cannot_help() -> None:
    async def scenario(served: Served, client: AsyncOpenAI) -> None:
        with pytest.raises(openai.InternalServerError):
            await client.completions.create(model="fake", prompt="a")
        assert served.counted == {("/v1/completions", 504): 1}

    run(scenario, FakeEngine(refusal=DeadlinePassed("too late")))
