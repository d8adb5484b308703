"""Draft tokens over real stages: whatever is drafted, every answer stays as it is without draft tokens, bit for
bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ppserve import Completion, Pipeline
from tests.library.mixed import (
    PROMPTS,
    assert_same,
    generate_as,
    guesses_of,
    intake_of,
    mixed_requests,
    tiny,
    together,
)

pytestmark = pytest.mark.slow

COUNT = 12
VOCABULARY = 1280


@pytest.fixture(scope="module")
def plain() -> Iterator[Pipeline]:
    with tiny(speculate=0) as pipeline:
        yield pipeline


@pytest.fixture(scope="module")
def alone(plain: Pipeline) -> list[Completion]:
    return [plain.complete(prompt, **options) for prompt, options in requests()]


def requests() -> list[tuple[str, dict]]:
    """The mixed ones, which tell the ids of their tokens, so that a drafter can know them."""
    return [(prompt, options | {"token_ids": True}) for prompt, options in mixed_requests(COUNT)]


@pytest.mark.parametrize(("stages", "draft_tokens"), [(1, 3), (2, 1), (2, 5), (4, 15)])
def test_no_draft_token_changes_an_answer(stages: int, draft_tokens: int, alone: list[Completion]) -> None:
    with tiny(stages, speculate=draft_tokens) as pipeline:
        for drafted, plain in zip(together(pipeline, requests()), alone, strict=True):
            assert_same(drafted, plain)
        for (prompt, options), plain in zip(requests(), alone, strict=True):
            assert_same(pipeline.complete(prompt, **options), plain)
        outcomes = guesses_of(pipeline)
        assert outcomes["accepted"] > 0
        assert outcomes["rejected"] > 0


def test_what_lies_behind_a_stop_string_is_charged_to_nobody(plain: Pipeline) -> None:
    """The second step draws the stop string and, from accepted draft tokens, two tokens behind it."""
    options: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    prompt = PROMPTS[0] + plain.complete(PROMPTS[0], max_tokens=40, **options).text + " " + PROMPTS[0]
    stop = plain.complete(prompt, max_tokens=2, **options).text.split()[1]
    with tiny(1, speculate=7) as pipeline:
        stream = generate_as("c", pipeline, prompt, stop=[stop], max_tokens=8, token_ids=True, **options)
        (stopped,) = stream.completions()[0].sequences
        assert len(stopped.tokens) == 2
        assert guesses_of(pipeline)["accepted"] == 2
        assert pipeline._tokenizer is not None
        assert intake_of(pipeline).queue.served("c") == len(pipeline._tokenizer.encode(prompt)) + 2


def test_tensor_ranks_guess_as_well(alone: list[Completion]) -> None:
    with tiny(2, speculate=4, tensor_parallel=2) as pipeline:
        for number, (prompt, options) in enumerate(requests()[:4]):
            assert_same(pipeline.complete(prompt, **options), alone[number])
        assert sum(guesses_of(pipeline).values()) > 0
