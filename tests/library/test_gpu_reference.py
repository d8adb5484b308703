"""The GPU's backend in the CPU's place: plans, buckets, staging and sampling of a whole pipeline, without a
GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ppserve import Completion, Pipeline
from ppserve.stage.device import REFERENCE
from tests.library.mixed import assert_same, mixed_requests, tiny, together

pytestmark = pytest.mark.slow

COUNT = 5


@pytest.fixture(scope="module")
def on_cpu() -> Iterator[list[Completion]]:
    """By the CPU's own kernels, each request alone."""
    with tiny() as pipeline:
        yield [pipeline.complete(prompt, **options) for prompt, options in mixed_requests(COUNT)]


@pytest.fixture(scope="module")
def reference() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(REFERENCE, "1")
        yield


@pytest.fixture(scope="module")
def alone(on_cpu: object, reference: None) -> list[Completion]:
    with invariant() as pipeline:
        assert "as a GPU's reference" in pipeline.model.kernels
        assert pipeline.model.deterministic
        return [pipeline.complete(prompt, **options) for prompt, options in mixed_requests(COUNT)]


def invariant(stages: int = 1, **settings: Any) -> Pipeline:
    return tiny(stages, **{"batch_invariant": True, "max_num_seqs": 16, **settings})


def tokens(completions: list[Completion]) -> list[object]:
    return [
        [(s.text, s.finish, [token.id for token in s.tokens]) for s in completion.sequences]
        for completion in completions
    ]


@pytest.mark.parametrize(
    ("stages", "settings"),
    [
        (2, {"layers": "2.5,5.5", "block_size": 8, "prefill_chunk": 5, "max_num_seqs": 6}),
        (3, {"microbatches": 4, "max_num_seqs": 9, "cuda_graphs": False}),
    ],
)
def test_any_pipeline_answers_as_one_stage_alone(
    stages: int, settings: dict[str, Any], alone: list[Completion]
) -> None:
    """With `batch_invariant`: tokens, text and log-probabilities, bit for bit."""
    with invariant(stages, **settings) as pipeline:
        for mixed, by_itself in zip(together(pipeline, mixed_requests(COUNT)), alone, strict=True):
            assert_same(mixed, by_itself)


def test_tokens_are_those_of_the_cpu_also_without_the_choice(
    alone: list[Completion], on_cpu: list[Completion]
) -> None:
    """torch's products round differently in other company, by less than what separates these tokens."""
    assert tokens(alone) == tokens(on_cpu)
    with tiny(2, max_num_seqs=16) as pipeline:
        assert pipeline.model.deterministic == (not pipeline.model.why_not)
        assert tokens(together(pipeline, mixed_requests(COUNT))) == tokens(on_cpu)
