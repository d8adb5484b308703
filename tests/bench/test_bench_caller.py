"""One request and the times of what came, against a real gRPC server without a model."""

from __future__ import annotations

import asyncio

import pytest

from ppserve.bench.caller import Answer, Caller, Question
from ppserve.core.request import FinishReason
from ppserve.errors import Overloaded, StagesLost
from ppserve.head.engine.streams import TokenOutput
from tests.fake_engine import FakeEngine, served

QUESTION = Question(7, tuple(range(10)), 6)


def ask(engine: FakeEngine, question: Question = QUESTION) -> Answer:
    async def main() -> Answer:
        async with served(engine) as (_, target), Caller(target) as caller:
            return await caller.send_question(question, 0.0)

    return asyncio.run(main())


def test_what_is_asked_and_what_comes() -> None:
    engine = FakeEngine()
    answer = ask(engine)
    (request,) = engine.requests
    assert request.prompt_ids == tuple(range(10))
    assert request.stop.max_tokens == 6
    assert request.stop.ignore_eos
    assert request.sampling.temperature == 0
    assert answer.is_ok
    assert answer.num_tokens == 6
    assert 0 < answer.arrivals[0][0] <= answer.ended_s
    assert answer.ended_s == answer.arrivals[-1][0]
    assert len(answer.itls_s) == len(answer.arrivals) - 1


@pytest.mark.parametrize(
    ("engine", "num_prompt", "status"),
    [
        (FakeEngine(refusal=Overloaded("full", 1.0)), 10, "RESOURCE_EXHAUSTED"),
        (FakeEngine(break_error=StagesLost("gone"), break_after=2, num_breaks=1), 10, "UNAVAILABLE"),
        (FakeEngine(), 100, "INVALID_ARGUMENT"),
    ],
)
def test_a_failure_is_an_answer_with_a_status(engine: FakeEngine, num_prompt: int, status: str) -> None:
    answer = ask(engine, Question(0, (1,) * num_prompt, 6))
    assert (answer.is_ok, answer.status) == (False, status)
    assert answer.problem
    assert len(engine.requests) <= 1, "a load generator must not try again"


def by_hand(outputs: list[TokenOutput], timeout_s: float | None = None) -> Answer:
    async def main() -> Answer:
        engine = FakeEngine(by_hand=True)
        async with served(engine) as (_, target), Caller(target, timeout_s=timeout_s) as caller:
            asked = asyncio.create_task(caller.send_question(QUESTION, 0.0))
            await engine.until(lambda engine: bool(engine.sinks))
            (sink,) = engine.sinks.values()
            if outputs:
                sink(outputs)
            return await asked

    return asyncio.run(main())


def test_tokens_that_come_together_are_all_counted() -> None:
    tokens = [TokenOutput(0, offset, 97, "a") for offset in range(6)]
    tokens[-1] = TokenOutput(0, 5, 97, "a", finish=FinishReason.MAX_TOKENS)
    answer = by_hand(tokens)
    assert answer.is_ok
    assert answer.num_tokens == 6
    assert len(answer.arrivals) < 6


def test_an_early_end_is_a_failure() -> None:
    answer = by_hand([TokenOutput(0, 0, 97, "a", finish=FinishReason.CANCELLED)])
    assert (answer.is_ok, answer.status) == (False, "CANCELLED")
    assert by_hand([], timeout_s=0.2).status in ("DEADLINE", "DEADLINE_EXCEEDED")
