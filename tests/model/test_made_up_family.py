"""A third family costs what docs/contributing/family.md says: one file and two tables (`made_up_family.py`).

A brook is neither a GPT-2 nor a Llama: it has post-norms, a window in every second layer, two rotary bases, and a
scaled embedding.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import save_file

from ppserve.core.layers import Experts, LayerSpec
from ppserve.errors import CheckpointError
from ppserve.gguf_file import read_parts
from ppserve.model.backend import AttentionWeights, Backend, MLPWeights, ResidualWeights, Sublayer
from ppserve.model.checkpoint import Checkpoint, TensorPart
from ppserve.model.checkpoint.families import FAMILIES
from ppserve.model.checkpoint.gguf import _stored_tensors
from ppserve.model.checkpoint.opening import open_checkpoint
from ppserve.model.checkpoint.settings import checked_architecture
from ppserve.model.cpu.backend import CpuBackend
from ppserve.model.cuda.backend import CudaBackend, DeviceOptions
from ppserve.model.inputs import StepInputs
from ppserve.model.selftest import check_determinism, layers_of_each_kind
from tests.model import made_up_family
from tests.model.checkpoint.writers import random_tensors, stored_name, write_gguf
from tests.model.cuda.here import DEVICE, needs_triton, operators_of
from tests.model.made_up_family import FAMILY, BrookConfig
from tests.model.pipelines import CPU, Pipeline, prompt
from tests.model.random_checkpoint import RandomCheckpoint
from tests.model.test_tensor_ranks import TensorPipeline
from tests.reference import Reference

ARCH = BrookConfig(
    model_type="brook", rows=64, width=48, depth=3, heads=4, num_key_value_heads=2, length=96,
    intermediate_size=88, epsilon=1e-5, eos_token_id=7,
).architecture(Path())  # fmt: skip


@pytest.fixture(autouse=True)
def _with_an_entry() -> Iterator[None]:
    FAMILIES["brook"] = FAMILY
    yield
    del FAMILIES["brook"]


def write_hugging_face(directory: Path, **more: object) -> Path:
    config = {"model_type": "brook", "rows": 64, "width": 48, "num_hidden_layers": 3, "heads": 4, "length": 96}
    config |= {"num_key_value_heads": 2, "intermediate_size": 88, "epsilon": 1e-5, "eos_token_id": 7}
    (directory / "config.json").write_text(json.dumps(config | more))
    tensors = {stored_name("brook", name, 0, "brook.bends."): of for name, of in random_tensors(ARCH).items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def write_as_gguf(directory: Path) -> Path:
    return write_gguf(directory / "model.gguf", ARCH, random_tensors(ARCH), model="brook")


@pytest.mark.parametrize("write", [write_hugging_face, write_as_gguf])
def test_a_third_family_is_one_file_and_two_tables(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    lines = Path(made_up_family.__file__).read_text().splitlines()
    assert len(lines) <= 60
    checkpoint = open_checkpoint(str(write(tmp_path)))
    assert checkpoint.architecture == ARCH
    every, second, third = ARCH.layers
    assert every is third
    assert (every.attention.window, second.attention.window, len(ARCH.rotaries)) == (None, 7, 2)
    close_to_reference(Pipeline(checkpoint, "1.5,1.5", num_sequences=1), checkpoint, 1e-4)


def close_to_reference(pipeline: Pipeline, checkpoint: Checkpoint, limit: float) -> None:
    ids = prompt(60, vocab_size=64)
    logits, expected = pipeline.logits(pipeline.hidden(ids, 13)), Reference(checkpoint).logits(ids)
    assert (logits - expected).abs().max() < limit * expected.abs().max()
    assert expected.std() > 0.5, "logits too close together to tell a wrong model from a right one"


MAKE: dict[str, Callable[[], Backend]] = {
    "float32": lambda: CpuBackend("float32", 2),
    "bfloat16": lambda: CpuBackend("bfloat16"),
    "int8": lambda: CpuBackend("float32", quantization="int8", kv_dtype="int8"),
    "gpu reference": lambda: CudaBackend(
        CPU, "float32", DeviceOptions(batch_invariant=True), operators_of("reference")
    ),
}
CLOSE = {"bfloat16": 0.1, "int8": 0.1}


@pytest.mark.parametrize("kind", MAKE)
def test_it_equals_its_reference_with_the_same_bits_however_it_is_cut(kind: str) -> None:
    """Stages, chunks, neighbours, and tensor ranks."""
    checkpoint, ids = RandomCheckpoint(ARCH), prompt(60, vocab_size=64)
    whole = Pipeline(checkpoint, "3", backend=MAKE[kind](), num_sequences=2)
    close_to_reference(whole, checkpoint, CLOSE.get(kind, 1e-4))
    expected = whole.hidden(ids, 60)
    for split, chunk in (("3", 1), ("3", 7), ("1.5,1.5", 13), ("1,1,1", 32), ("1,1.5,0.5", 60)):
        cut = Pipeline(checkpoint, split, backend=MAKE[kind](), num_sequences=2)
        assert torch.equal(cut.hidden(ids, chunk), expected), f"{split} in chunks of {chunk}"
    beside = [whole.slice(1, prompt(20, 1, 64), 0), whole.slice(0, ids, 0)]
    assert torch.equal(whole.step(beside)[0][20:], expected)
    if kind != "gpu reference":
        ranks = TensorPipeline(checkpoint, "1.5,1.5", 2, MAKE[kind])
        assert torch.equal(ranks.hidden(ids, 13), expected)
        ranks.close()


@pytest.mark.parametrize(
    ("split", "stage", "kinds"), [("3", 0, [(0, 1), (2, 3)]), ("0.5,2,0.5", 1, [(3, 0), (1, 2)])]
)
def test_the_self_test_covers_each_kind_of_layer(split: str, stage: int, kinds: list[tuple[int, ...]]) -> None:
    """The stage may begin with an MLP. kinds: the numbers of the stage's sublayers."""
    model = Pipeline(RandomCheckpoint(ARCH), split, num_sequences=1).stages[stage]
    found = [tuple(map(model.sublayers.index, layer)) for layer in layers_of_each_kind(model)]
    assert sorted(map(sorted, found)) == sorted(map(sorted, kinds))


class FeelsInWindows(CpuBackend):
    """A layer with a window is wrong where it computes single rows."""

    def fused(self, lines: Sequence[ResidualWeights]) -> None:
        return None

    def attention(self, weights: AttentionWeights) -> Sublayer:
        exact = super().attention(weights)
        if weights.spec.window is None:
            return exact
        return lambda x_TD, inputs: exact(x_TD, inputs) + 1e-6 * (len(x_TD) == 1)


def test_the_self_test_sees_what_is_wrong_in_the_second_kind_alone() -> None:
    stage = Pipeline(RandomCheckpoint(ARCH), "3", backend=FeelsInWindows("float32"), num_sequences=1).stages[0]
    reason = check_determinism(stage)
    assert reason == "hidden states of a prompt token by token differ from the same prompt at once and alone"


CHANGED: list[tuple[Callable[[LayerSpec], LayerSpec], str]] = [
    (lambda layer: replace(layer, mlp=replace(layer.mlp, experts=Experts(8, 2))), "has a mixture of experts"),
    (lambda layer: replace(layer, attention=replace(layer.attention, has_sinks=True)), "has attention sinks"),
    (lambda layer: replace(layer, attention=replace(layer.attention, num_kv_heads=4)), "has other heads than"),
    (lambda layer: replace(layer, attention=replace(layer.attention, head_size=24)), "has other heads than"),
]


@pytest.mark.parametrize(("change", "reason"), CHANGED)
def test_a_layer_that_no_backend_computes_is_refused(
    change: Callable[[LayerSpec], LayerSpec], reason: str
) -> None:
    """The refusal has the words of the file, and the layer's number."""
    path, layers = Path("config.json"), ARCH.layers
    assert checked_architecture(path, ARCH, "heads").layers == layers
    with pytest.raises(CheckpointError, match=f"config.json: layer 1 {reason}"):
        checked_architecture(path, replace(ARCH, layers=(layers[0], change(layers[1]), layers[2])), "heads")


@pytest.mark.parametrize("kind", ["float32", "gpu reference"])
def test_what_a_sublayer_adds_is_multiplied_without_post_norms_too(kind: str) -> None:
    """No fused block of a CPU does that."""
    arch = ARCH.with_layers(lambda layer: replace(layer, post_norm=None, residual_multiplier=0.5))
    checkpoint = RandomCheckpoint(arch)
    close_to_reference(Pipeline(checkpoint, "3", backend=MAKE[kind](), num_sequences=1), checkpoint, 1e-4)


@needs_triton
def test_it_equals_its_reference_on_triton() -> None:
    checkpoint, ids = RandomCheckpoint(ARCH), prompt(24, vocab_size=64)
    whole, cut = (
        Pipeline(checkpoint, split, backend=CudaBackend(DEVICE, "float32", operators=operators_of("triton")))
        for split in ("3", "1.5,1.5")
    )
    logits = whole.logits(whole.hidden(ids, 24)).cpu()
    torch.testing.assert_close(logits, Reference(checkpoint).logits(ids), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(whole.logits(cut.hidden(ids, 7)).cpu(), logits, atol=1e-4, rtol=1e-4)


def test_its_unknown_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="rapids"):
        open_checkpoint(str(write_hugging_face(tmp_path, rapids=3)))


class RowByRow(CpuBackend):
    """An MLP computes every second row of a step, and then the others, as one of several experts would."""

    def mlp(self, weights: MLPWeights) -> Sublayer:
        whole = super().mlp(weights)

        def compute(x_TD: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
            out_TD = torch.empty_like(x_TD)
            for first in range(min(2, len(x_TD))):
                out_TD[first::2] = whole(x_TD[first::2], inputs)
            return out_TD

        return compute


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_an_mlp_computes_some_rows_of_a_step_as_it_computes_all(quantization: str) -> None:
    checkpoint, ids = RandomCheckpoint(ARCH), prompt(60, vocab_size=64)
    whole, parts = (
        Pipeline(checkpoint, "3", backend=backend("float32", 2, quantization), num_sequences=1)
        for backend in (CpuBackend, RowByRow)
    )
    assert torch.equal(parts.hidden(ids, 23), whole.hidden(ids, 23))


def test_names_of_experts_have_their_numbers(tmp_path: Path) -> None:
    """A GGUF has the experts of a layer in one tensor."""
    names = {"mlp.router": ("steer", "ffn_gate_inp"), "mlp.{}.up": ("rise.{}", "ffn_up_exps.{}")}
    family = replace(FAMILY, names=names)
    for number in ("0", "7", "127"):
        assert family.hugging_face_name(f"brook.bends.3.rise.{number}.weight") == f"h.3.mlp.{number}.up.weight"
        assert family.gguf_name(f"blk.3.ffn_up_exps.{number}.weight") == f"h.3.mlp.{number}.up.weight"
    for unknown in ("brook.bends.3.rise.weight", "brook.bends.3.rise.07.weight", "brook.bends.3.rise.1.2.weight"):
        assert family.hugging_face_name(unknown) == unknown.removeprefix("brook.")
    experts = {number: torch.randn(5, 32) for number in range(3)}
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "brook")
    writer.add_tensor("blk.3.ffn_up_exps.weight", torch.stack([*experts.values()]).numpy())
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    found = _stored_tensors(path, read_parts(path)[path])
    assert [family.gguf_name(of.name) for of in found] == [f"h.3.mlp.{number}.up.weight" for number in experts]
    for tensor, weight in zip(found, experts.values(), strict=True):
        assert torch.equal(tensor.read(TensorPart((slice(1, 4),)), torch.float32), weight[1:4])
