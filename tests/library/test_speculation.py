"""Draft tokens over real stages: whatever is drafted, every answer stays as it is without draft tokens, bit for
bit."""

from __future__ import annotations

import pytest

from ppserve import Completion, Pipeline
from tests.library.mixed import assert_same, mixed_requests, tiny, together

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def alone() -> list[Completion]:
    with tiny(speculate=0) as plain:
        return [plain.complete(prompt, **options) for prompt, options in mixed_requests(12)]


def draft_tokens_of(pipeline: Pipeline) -> dict[str, int]:
    """Draft tokens so far, by what became of them."""
    scheduler = pipeline._engine.replicas[0].scheduler
    assert scheduler is not None
    return scheduler.num_draft_tokens


@pytest.mark.parametrize(("stages", "draft_tokens"), [(1, 3), (2, 1), (2, 5), (4, 15)])
def test_no_draft_token_changes_an_answer(stages: int, draft_tokens: int, alone: list[Completion]) -> None:
    with tiny(stages, speculate=draft_tokens) as pipeline:
        for drafted, plain in zip(together(pipeline, mixed_requests(12)), alone, strict=True):
            assert_same(drafted, plain)
        for (prompt, options), plain in zip(mixed_requests(12), alone, strict=True):
            assert_same(pipeline.complete(prompt, **options), plain)
        outcomes = draft_tokens_of(pipeline)
        assert outcomes["accepted"] > 0
        assert outcomes["rejected"] > 0


def test_tensor_ranks_draft_as_well(alone: list[Completion]) -> None:
    with tiny(2, speculate=4, tensor_parallel=2) as pipeline:
        for number, (prompt, options) in enumerate(mixed_requests(12)[:4]):
            assert_same(pipeline.complete(prompt, **options), alone[number])
        assert sum(draft_tokens_of(pipeline).values()) > 0
