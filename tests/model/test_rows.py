"""A row's numbers depend on that row: not on chunking, neighbours, threads or how rows share loads."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
import torch

from ppserve.core.architecture import Architecture
from ppserve.model.backend import (
    AttentionWeights,
    Backend,
    Head,
    Linear,
    NormWeights,
    ResidualWeights,
    Sublayer,
)
from ppserve.model.checkpoint import Matrix, MatrixInMemory
from ppserve.model.checkpoint.families import FAMILIES
from ppserve.model.cpu.backend import CpuBackend
from ppserve.model.cuda.backend import CudaBackend, DeviceOptions
from ppserve.model.inputs import StepRows
from ppserve.model.selftest import check_determinism
from tests.model.pipelines import BACKENDS, CPU, Pipeline, prompt
from tests.model.random_checkpoint import RandomCheckpoint, architecture, llama

pytestmark = pytest.mark.slow

DTYPES = ["float32", "bfloat16"]
ARCHITECTURES = {
    **{f"gpt2 {width}": architecture(width=width) for width in (48, 100, 160)},
    "llama": llama(heads=9, kv_heads=3, head_width=64),
    "qwen 3": llama(width=42, heads=6, kv_heads=2, head_width=10, inner_width=70, qk_norms=True),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_any_chunking_gives_the_same_bits(arch: Architecture, dtype: str) -> None:
    pipeline = Pipeline(RandomCheckpoint(arch), "2", dtype, num_sequences=2)
    ids = prompt(101)
    whole = pipeline.hidden(ids, len(ids))
    logits = pipeline.logits(whole)
    for chunk in (1, 2, 3, 4, 7, 16, 37):
        cut = pipeline.hidden(ids, chunk, sequence=1)
        assert torch.equal(cut, whole), f"chunks of {chunk}"
        assert torch.equal(pipeline.logits(cut), logits)


@pytest.mark.parametrize("stale", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "backend", [*BACKENDS.values(), CpuBackend("float32", kv_dtype="int8")], ids=[*BACKENDS, "int8"]
)
@pytest.mark.parametrize("arch", [architecture(), llama()], ids=FAMILIES)
def test_stale_blocks_are_never_read(arch: Architecture, backend: Backend, stale: float) -> None:
    """What a sequence with non-finite numbers left behind does not reach the next owner of its blocks."""
    pipeline = Pipeline(RandomCheckpoint(arch), "2", backend=backend)
    clean = pipeline.hidden(prompt(21), 21)
    for cache in pipeline.caches:
        cache.fill(stale)
    assert torch.equal(pipeline.hidden(prompt(21), 21), clean)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arch", [llama(), llama(qk_norms=True, qkv_biases=True)])
def test_selftest_passes_for_a_llama(arch: Architecture, dtype: str) -> None:
    stages = Pipeline(RandomCheckpoint(arch), "1,1", dtype).stages
    assert [check_determinism(stage) for stage in stages] == [None] * 2


class InTwoHalves(CudaBackend):
    """Its products are summed in two halves from 128 rows on; what comes out is rounded to bfloat16, as a
    library's bfloat16 products are, so that with usual weights hardly a number differs."""

    def linear(self, weight_NK: Matrix, bias_N: torch.Tensor | None, for_selftest: bool = False) -> Linear:
        whole, half = super().linear(weight_NK, bias_N), weight_NK.shape[1] // 2
        of_low, of_high = (
            MatrixInMemory(part) for part in weight_NK[:].split([half, weight_NK.shape[1] - half], 1)
        )
        low, high = super().linear(of_low, None), super().linear(of_high, bias_N)

        class Halves:
            num_inputs, num_outputs, num_bytes = whole.num_inputs, whole.num_outputs, 0

            def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
                y_TN = whole(x_TK)
                if len(x_TK) >= 128:
                    y_TN = low(x_TK[:, :half].contiguous()) + high(x_TK[:, half:].contiguous())
                return y_TN.bfloat16().float()

        return Halves()


def test_selftest_sees_any_change_of_order() -> None:
    backend = InTwoHalves(CPU, "float32", DeviceOptions(batch_invariant=True, max_rows=4, max_step_rows=68))
    stage = Pipeline(RandomCheckpoint(architecture()), "1,1", backend=backend).stages[0]
    said = check_determinism(stage)
    assert said is not None
    assert re.match(r"a linear layer of 48 inputs: (the last )?rows differ between \d+ and 128 rows", said)


class FeelsInHead(CpuBackend):
    """The LM head is right by itself, not in the call that serving makes."""

    def head(self, norm: NormWeights, linear: Linear) -> Head:
        exact = super().head(norm, linear)
        return lambda hidden_RD: exact(hidden_RD) + 1e-6 * len(hidden_RD)


def test_selftest_makes_the_calls_that_serving_makes() -> None:
    stage = Pipeline(RandomCheckpoint(architecture()), "1,1", backend=FeelsInHead("float32")).stages[1]
    assert check_determinism(stage) == "logits of hidden states: rows differ between 1 and 64 rows at once"


class Sensitive(CpuBackend):
    """Attention gives other numbers in some steps."""

    def __init__(self, feels: Callable[[StepRows], bool]) -> None:
        super().__init__("float32")
        self._feels = feels

    def fused(self, lines: Sequence[ResidualWeights]) -> None:
        return None

    def attention(self, weights: AttentionWeights) -> Sublayer:
        exact = super().attention(weights)
        return lambda x_TD, inputs: exact(x_TD, inputs) + 1e-6 * self._feels(inputs.rows)


@pytest.mark.parametrize(
    ("feels", "way"),
    [
        (lambda rows: len(rows.slots_T) == 1, "token by token"),
        (lambda rows: len(rows.slots_T) == 7 and rows.start_S[0] > 0, "in chunks of 7"),
        (lambda rows: len(rows.slots_T) == 64, "in chunks of 64"),
        (lambda rows: len(rows.start_S) > 1 and rows.start_S[0] == 0, "in one step with others"),
        (lambda rows: len(rows.start_S) > 1 and rows.start_S[0] > 0, "ending in a step of decodes"),
    ],
)
def test_selftest_says_which_company_was_felt(feels: Callable[[StepRows], bool], way: str) -> None:
    stage = Pipeline(RandomCheckpoint(architecture()), "1,1", backend=Sensitive(feels)).stages[0]
    said = f"hidden states of a prompt {way} differ from the same prompt at once and alone"
    assert check_determinism(stage) == said


def test_kernels_have_names() -> None:
    stage = Pipeline(RandomCheckpoint(architecture()), "1,1").stages[0]
    said = stage.backend.describe()
    assert said.startswith("float32")
    assert said == CpuBackend("float32").describe()
    assert said != CpuBackend("bfloat16").describe()
    assert said != BACKENDS["gpu reference"].describe()
