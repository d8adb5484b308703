"""int8 weights, and keys and values in another dtype: the same answers over any pipeline and any kernels."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from typing import Any

import pytest

from ppserve.model.cpu.kernels.variants import VARIABLE, available, features, in_use
from ppserve.stage.device import REFERENCE
from tests.library.mixed import assert_same, mixed_requests, tiny, together
from tests.slow import thorough

AS_GPU = {"batch_invariant": True, "max_num_seqs": 9}
AS_GPU_SHAPES: list[tuple[int, dict[str, Any]]] = [(3, {"microbatches": 4, "cuda_graphs": False})]
INT8 = {"quantization": "int8", "kv_dtype": "int8"}
SHAPES: list[tuple[int, dict[str, Any]]] = [
    (3, {"layers": "1.5,5,1.5", "block_size": 8, "prefill_chunk": 5, "threads": 2}),
    (2, {"tensor_parallel": 2, "prefill_chunk": 7}),
]
FURTHER_SHAPES: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (4, {"threads": 2}),
    (1, {"tensor_parallel": 4}),
    (1, {"tensor_parallel": 2, "replicas": 2}),
    (1, {"tensor_parallel": 2}),
    (1, {"tensor_parallel": 3}),
    (2, {"microbatches": 3}),
    (4, {"max_num_seqs": 7}),
    (8, {"block_size": 32}),
    (2, {"replicas": 2}),
    (1, {"replicas": 2}),
    (1, {"replicas": 3}),
    (1, {"replicas": 4}),
]
"""The remaining ways to use up to four ranks. They are tried in float32 alone: `test_tensor_ranks` has other
numbers, and only tensor ranks change arithmetic here."""


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "numbers",
    [
        INT8,
        AS_GPU,
        *thorough(
            {},
            {"dtype": "bfloat16"},
            {"quantization": "int8"},
            INT8 | {"dtype": "bfloat16"},
            {"kv_dtype": "bfloat16"},
            {"kv_dtype": "float32", "dtype": "bfloat16"},
        ),
    ],
    ids=lambda numbers: " ".join(map(str, numbers.values())) or "float32",
)
def test_any_pipeline_among_others_answers_as_one_stage_alone(
    numbers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, text and log-probabilities, bit for bit."""
    if numbers is AS_GPU:
        monkeypatch.setenv(REFERENCE, "1")
    requests = mixed_requests(8)
    with tiny(**numbers) as pipeline:
        assert pipeline.model.deterministic, pipeline.model.nondeterministic_reason
        alone = [pipeline.complete(prompt, **options) for prompt, options in requests]
    for stages, settings in AS_GPU_SHAPES if numbers is AS_GPU else SHAPES + FURTHER_SHAPES * (not numbers):
        with tiny(stages, **numbers, **settings) as pipeline:
            for mixed, by_itself in zip(together(pipeline, requests), alone, strict=True):
                assert_same(mixed, by_itself)


@pytest.mark.slow
def test_other_numbers_have_other_log_probabilities() -> None:
    """The control: int8 weights, and int8 keys and values, do reach the arithmetic."""
    said = set()
    for numbers in ({}, {"quantization": "int8"}, {"kv_dtype": "int8"}, INT8):
        with tiny(**numbers) as pipeline:
            answer = pipeline.complete("Once upon a time", seed=1, max_tokens=8, ignore_eos=True, logprobs=1)
            said.add(answer.sequences[0].tokens)
    assert len(said) == 4


def digests_of_answers() -> list[str]:
    """Return the digests of answers on two stages: of float32 with int8, and of bfloat16."""
    digests = []
    for kinds in (({}, INT8), ({"dtype": "bfloat16"},)):
        digest = hashlib.sha256()
        for numbers in kinds:
            with tiny(2, **numbers) as pipeline:
                assert pipeline.model.deterministic
                for answer in together(pipeline, mixed_requests(8)):
                    for one in answer.sequences:
                        digest.update(repr((one.finish, one.text, one.tokens, one.prompt_tokens)).encode())
        digests.append(digest.hexdigest())
    return digests


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_every_kernel_variant_gives_the_same_answers() -> None:
    """Pipelines whose hosts differ keep the promise; but AMX sums bfloat16 in an order of its own."""
    script = "from tests.library.test_numbers import digests_of_answers; print(*digests_of_answers())"
    own = in_use()
    exact, bfloat16 = ({own: digest} for digest in digests_of_answers())
    for variant in set(available(features())) - {own}:
        environment = os.environ | {VARIABLE: variant}
        ran = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        exact[variant], bfloat16[variant] = ran.stdout.split()
    assert len(set(exact.values())) == 1, exact
    bfloat16.pop("amx", None)
    assert len(set(bfloat16.values())) == 1, bfloat16
