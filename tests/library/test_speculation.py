"""Draft tokens over real stages: whatever is drafted, every answer stays as it is without draft tokens, bit for
bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ppserve import Completion, Pipeline
from tests.library.mixed import (
    assert_same,
    guesses_of,
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


def test_tensor_ranks_guess_as_well(alone: list[Completion]) -> None:
    with tiny(2, speculate=4, tensor_parallel=2) as pipeline:
        for number, (prompt, options) in enumerate(requests()[:4]):
            assert_same(pipeline.complete(prompt, **options), alone[number])
        assert sum(guesses_of(pipeline).values()) > 0
