"""int8 weights: from any checkpoint format the same, as large as `plan` says, and close to what they stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ppserve.core.architecture import Architecture, Split, StageLayout, stage_layouts
from ppserve.errors import ConfigError
from ppserve.model.backend import Linear
from ppserve.model.checkpoint import WHOLE, Checkpoint, Matrix, MatrixInMemory, TensorPart
from ppserve.model.checkpoint.families import FAMILIES, tensor_shapes
from ppserve.model.checkpoint.opening import open_checkpoint
from ppserve.model.cpu.backend import CpuBackend
from ppserve.model.cpu.linear import READ_BYTES
from ppserve.model.decoder import load_stage
from ppserve.planning.forecast import ForecastRequest, forecast
from tests.model.checkpoint import writers
from tests.model.checkpoint.parity import hugging_face
from tests.model.pipelines import Pipeline, prompt
from tests.model.random_checkpoint import RandomCheckpoint, architecture, llama


def int8(dtype: str = "float32") -> CpuBackend:
    return CpuBackend(dtype, quantization="int8")


def of_gpt2(directory: Path) -> list[Path]:
    """One model in several formats."""
    arch = writers.architecture()
    tensors = writers.random_tensors(arch)
    kinds = ("safetensors in parts", "bin", "llm.c", "GGUF")
    return [writers.WRITERS[kind](directory / kind, arch, tensors) for kind in kinds]


def of_llama(directory: Path) -> list[Path]:
    stored = open_checkpoint(str(hugging_face(directory / "files", model="Llama", parts=2).place))
    tensors = {name: stored.tensor(name) for name in tensor_shapes(stored.architecture)}
    file = writers.write_gguf(directory / "llama.gguf", stored.architecture, tensors, model="llama")
    return [directory / "files", file]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("written", [of_gpt2, of_llama])
def test_int8_is_the_same_from_every_format_and_split(
    tmp_path: Path, written: Callable[[Path], list[Path]], dtype: str
) -> None:
    first = None
    for place in written(tmp_path):
        checkpoint: Checkpoint = open_checkpoint(str(place)).rounded_to(dtype)
        ids = prompt(20, vocab_size=checkpoint.architecture.vocab_size)
        for split in ("3", "1.5,1.5"):
            pipeline = Pipeline(checkpoint, split, backend=int8(dtype), num_sequences=1)
            logits = pipeline.logits(pipeline.hidden(ids, 20))
            first = logits if first is None else first
            assert torch.equal(logits, first), (place, split)


@pytest.mark.parametrize("arch", [architecture(width=96), llama(width=96)], ids=FAMILIES)
@pytest.mark.parametrize(("quantization", "limit"), [("int8", 0.05), ("int4", 0.5)])
def test_quantized_weights_are_close_to_what_they_stand_for(
    arch: Architecture, quantization: str, limit: float
) -> None:
    checkpoint, ids = RandomCheckpoint(arch), prompt(60)
    quantized = CpuBackend("float32", quantization=quantization)
    exact, rounded = (Pipeline(checkpoint, "2", backend=of) for of in (CpuBackend("float32"), quantized))
    theirs, ours = (pipeline.logits(pipeline.hidden(ids, 60)) for pipeline in (exact, rounded))
    error = (ours - theirs).square().mean().sqrt() / theirs.square().mean().sqrt()
    assert 1e-4 < error < limit


class CountingReads(Checkpoint):
    """A checkpoint that remembers the largest part of each linear's weight."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, self.largest_bytes = checkpoint, 0
        self.path, self.architecture = checkpoint.path, checkpoint.architecture
        self.stored_dtype = checkpoint.stored_dtype

    def tensor(self, name: str, part: TensorPart = WHOLE) -> torch.Tensor:
        tensor = self._checkpoint.tensor(name, part)
        if ".c_" in name or name.startswith("lm_head"):
            self.largest_bytes = max(self.largest_bytes, tensor.nbytes)
        return tensor


@pytest.mark.parametrize(
    ("container", "num_tensor"),
    [
        ("safetensors", 2),
        *(pytest.param(container, 1, marks=pytest.mark.slow) for container in ("bin", "nanoGPT")),
    ],
)
def test_no_large_matrix_is_whole_in_memory_while_it_is_quantised(
    tmp_path: Path, container: str, num_tensor: int
) -> None:
    """The head has 20 MB, an MLP's matrices 17; of two tensor ranks each has half. The bits are the same."""
    arch = writers.architecture(num_layers=1, width=1024, inner_width=4096, vocab_size=5000)
    tensors = writers.random_tensors(arch)
    checkpoint = CountingReads(open_checkpoint(str(writers.WRITERS[container](tmp_path, arch, tensors))))
    layout = StageLayout(0, 1, 0, 2, num_tensor - 1, num_tensor)
    stage = load_stage(checkpoint, layout, int8())
    assert READ_BYTES / 2 < checkpoint.largest_bytes <= READ_BYTES
    whole = load_stage(checkpoint, layout, WholeMatrices("float32", quantization="int8"))
    assert checkpoint.largest_bytes > READ_BYTES
    assert stage.head is not None
    assert whole.head is not None
    x_TD, x_TF = torch.randn(3, 1024), torch.randn(3, 4096)
    assert torch.equal(stage.head.logits(x_TD), whole.head.logits(x_TD))
    for name, linear in stage.linears.items():
        x_TK = x_TF if linear.num_inputs == arch.inner_width else x_TD
        assert torch.equal(linear(x_TK), whole.linears[name](x_TK))


class WholeMatrices(CpuBackend):
    """The control: asks for every matrix at once."""

    def linear(self, weight_NK: Matrix, bias_N: torch.Tensor | None, for_selftest: bool = False) -> Linear:
        return super().linear(MatrixInMemory(weight_NK[:]), bias_N)

    def lm_head(self, weight_NK: Matrix) -> Linear:
        return super().lm_head(MatrixInMemory(weight_NK[:]))


@pytest.mark.parametrize("split", ["3", "1.5,1.5"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize(
    "arch",
    [
        architecture(num_layers=3, width=256, vocab_size=2048),
        llama(num_layers=3, width=256, kv_heads=1, head_width=64, inner_width=768, vocab_size=2048),
    ],
    ids=FAMILIES,
)
def test_a_stage_takes_the_bytes_that_were_planned(
    arch: Architecture, split: str, dtype: str, quantization: str
) -> None:
    """They differ only by the padding of outputs and inputs to whole panels, and by biases, which are always
    float32."""
    request = ForecastRequest(
        len(Split.parse(split).sublayers), Split.parse(split), dtype=dtype, quantization=quantization
    )
    plan = forecast(arch, request)
    for layout, planned in zip(stage_layouts(Split.parse(split)), plan.stages, strict=True):
        backend = CpuBackend(dtype, quantization=quantization)
        stage = load_stage(RandomCheckpoint(arch), layout, backend)
        assert planned.weight_bytes <= stage.weight_bytes <= 1.03 * planned.weight_bytes


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_a_block_takes_the_bytes_that_were_planned(kv_dtype: str) -> None:
    arch, layout = llama(head_width=16), stage_layouts(Split.parse("2"))[0]
    (planned,) = forecast(arch, ForecastRequest(1, kv_dtype=kv_dtype)).stages
    backend = CpuBackend("float32", kv_dtype=kv_dtype)
    assert backend.block_bytes(arch, layout, 16) == 16 * planned.kv_bytes_per_token


def test_float16_is_refused_with_int8_as_well() -> None:
    with pytest.raises(ConfigError, match="--dtype: float16 needs a GPU"):
        CpuBackend("float16", quantization="int8")
