"""The client that most people have, openai-python, as it is, against a server with an engine without a model."""

from __future__ import annotations

import openai
import pytest
from openai import AsyncOpenAI

from ppserve.errors import Overloaded, StagesLost
from tests.head.api.http.asking import Served


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
