"""The same model in every format: identical canonical tensors, architecture and fingerprint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ppserve.core.architecture import Architecture
from ppserve.model.checkpoint import WHOLE, Checkpoint, TensorPart
from ppserve.model.checkpoint.families import tensor_shapes
from ppserve.model.checkpoint.opening import open_checkpoint, read_architecture
from ppserve.model.checkpoint.tensors import fingerprint
from tests.model.checkpoint.writers import (
    Tensors,
    architecture,
    hf_state,
    random_tensors,
    write_gguf,
    write_hf,
    write_hf_state,
    write_llmc,
    write_nanogpt,
)
from tests.model.random_checkpoint import RandomCheckpoint
from tests.model.random_checkpoint import architecture as of_random

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def check(checkpoint: Checkpoint, arch: Architecture, tensors: Tensors) -> None:
    assert checkpoint.architecture == arch
    for name in tensor_shapes(arch):
        read = checkpoint.tensor(name)
        assert read.dtype == tensors[name].dtype, name
        assert read.device.type == "cpu"
        assert torch.equal(read, tensors[name]), name
    assert checkpoint.stored_dtype == DTYPE_NAMES[tensors["wte.weight"].dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("prefix", ["transformer.", ""])
@pytest.mark.parametrize("container", ["safetensors", "bin", "legacy"])
def test_hugging_face(tmp_path: Path, container: str, prefix: str, parts: int, dtype: torch.dtype) -> None:
    arch = architecture(inner_width=56, tied_embeddings=parts == 1)
    tensors = random_tensors(arch, dtype=dtype)
    write_hf(tmp_path, arch, tensors, container=container, parts=parts, prefix=prefix)
    check(open_checkpoint(str(tmp_path)), arch, tensors)
    assert read_architecture(str(tmp_path)) == arch


@pytest.mark.parametrize("container", ["safetensors", "bin", "legacy", "nanogpt"])
def test_a_head_that_is_a_copy_of_the_embedding_is_tied(tmp_path: Path, container: str) -> None:
    """Its bits count, not its place in the file, nor its layout there."""
    arch = architecture(activation="gelu" if container == "nanogpt" else "gelu_new")
    tensors = random_tensors(arch)
    copy = tensors["wte.weight"].clone()
    turned = copy.T.contiguous().T if container != "safetensors" else copy.clone()
    if container == "nanogpt":
        path = write_nanogpt(tmp_path / "ckpt.pt", arch, tensors | {"wte.weight": turned, "lm_head.weight": copy})
    else:
        path = write_hf(tmp_path, arch, tensors, container=container)
        state = hf_state(arch, tensors) | {"transformer.wte.weight": turned, "lm_head.weight": copy}
        write_hf_state(path, state, container=container)
    assert open_checkpoint(str(path)).architecture == arch


@pytest.mark.parametrize("version", [3, 5])
@pytest.mark.parametrize("vocab_size", [37, 48])
def test_llmc(tmp_path: Path, version: int, vocab_size: int) -> None:
    arch = architecture(vocab_size=vocab_size, padded_vocab_size=48)
    tensors = random_tensors(arch, dtype=torch.bfloat16 if version == 5 else torch.float32)
    path = write_llmc(tmp_path / "gpt2_124M.bin", arch, tensors, version)
    check(open_checkpoint(str(path)), arch, tensors)
    check(open_checkpoint(str(tmp_path)), arch, tensors)
    assert read_architecture(str(path)) == arch


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [
        *(("F32", 0.0), ("F16", 1e-3), ("BF16", 1e-2), ("Q8_0", 2e-2)),
        *(("Q4_0", 0.3), ("Q4_1", 0.3), ("Q5_0", 0.2), ("Q5_1", 0.2)),
    ],
)
def test_gguf(tmp_path: Path, kind: str, tolerance: float) -> None:
    """Numbers near those written, exactly so where they are not quantized; parts are those of the whole."""
    arch = architecture(width=64, inner_width=256, vocab_size=37, padded_vocab_size=40)
    tensors = random_tensors(arch)
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "model.gguf", arch, tensors, kind)))
    assert checkpoint.architecture == arch == read_architecture(str(tmp_path))
    part = TensorPart((slice(3, 9), slice(70, 90)), slice(5, 40))
    for name in tensor_shapes(arch):
        whole = checkpoint.tensor(name)
        assert torch.allclose(whole.float(), tensors[name], rtol=0, atol=tolerance), name
        if name.endswith("c_attn.weight"):
            assert torch.equal(checkpoint.tensor(name, part), part.select(whole))


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "module._orig_mod."])
def test_nanogpt(tmp_path: Path, prefix: str, biases: bool) -> None:
    arch = architecture(biases=biases, activation="gelu")
    tensors = random_tensors(arch)
    path = write_nanogpt(tmp_path / "ckpt.pt", arch, tensors, prefix=prefix)
    check(open_checkpoint(str(path)), arch, tensors)
    check(open_checkpoint(str(tmp_path)), arch, tensors)
    assert read_architecture(str(path)) == arch


def test_a_tensor_shares_nothing_with_the_file(tmp_path: Path) -> None:
    arch = architecture()
    tensors = random_tensors(arch)
    for container in ("safetensors", "bin", "legacy"):
        checkpoint = open_checkpoint(str(write_hf(tmp_path / container, arch, tensors, container=container)))
        checkpoint.tensor("wte.weight").zero_()
        assert torch.equal(checkpoint.tensor("wte.weight"), tensors["wte.weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_while_reading_is_rounding_what_was_read(tmp_path: Path, dtype: torch.dtype) -> None:
    arch = architecture(width=640, num_heads=8, num_layers=1, inner_width=2560)
    checkpoint = open_checkpoint(str(write_hf(tmp_path, arch, random_tensors(arch))))
    rounded = checkpoint.rounded_to(DTYPE_NAMES[dtype])
    check(rounded, arch, {name: checkpoint.tensor(name).to(dtype) for name in tensor_shapes(arch)})
    assert checkpoint.stored_dtype == "float32"


def test_views_and_transposes_are_read_right(tmp_path: Path) -> None:
    """Tensors that share a storage, or lie in it in another order, are legitimate."""
    arch = architecture()
    tensors = random_tensors(arch)
    state = hf_state(arch, tensors)
    state["transformer.wpe.weight"] = torch.cat([torch.zeros(5, 20), tensors["wpe.weight"]])[5:]
    state["transformer.wte.weight"] = tensors["wte.weight"].T.contiguous().T
    write_hf_state(write_hf(tmp_path, arch, tensors, container="bin"), state, container="bin")
    check(open_checkpoint(str(tmp_path)), arch, tensors)


def test_one_model_in_all_formats_has_one_fingerprint(tmp_path: Path) -> None:
    arch = architecture(width=40, num_heads=4, inner_width=160)
    tensors = random_tensors(arch)
    places = (
        write_hf(tmp_path / "safetensors", arch, tensors),
        write_hf(tmp_path / "parts", arch, tensors, parts=3, prefix=""),
        write_hf(tmp_path / "bin", arch, tensors, container="bin"),
        write_hf(tmp_path / "legacy", arch, tensors, container="legacy"),
        write_llmc(tmp_path / "model.bin", arch, tensors),
        write_nanogpt(tmp_path / "ckpt.pt", arch, tensors),
    )
    assert len({fingerprint(open_checkpoint(str(place))) for place in places}) == 1


@pytest.mark.parametrize("name", tensor_shapes(of_random(num_layers=1)))
def test_a_single_tensor_that_was_trained_further_shows(name: str) -> None:
    class TrainedOn(RandomCheckpoint):
        def tensor(self, asked: str, part: TensorPart) -> torch.Tensor:  # type: ignore[override]
            return super().tensor(asked, part) * (1.001 if asked == name else 1.0)

    arch = of_random(num_layers=1, tied_embeddings=False)
    assert fingerprint(TrainedOn(arch)) != fingerprint(RandomCheckpoint(arch))


def test_adapters_of_queries_and_values_alone_show() -> None:
    class Adapted(RandomCheckpoint):
        def tensor(self, asked: str, part: TensorPart) -> torch.Tensor:  # type: ignore[override]
            whole = super().tensor(asked, WHOLE)
            if asked.endswith("attn.c_attn.weight"):
                keys = slice(len(whole) // 3, 2 * len(whole) // 3)
                changed = whole * 1.001
                changed[keys] = whole[keys]
                whole = changed
            return part.select(whole)

    arch = of_random(num_layers=1, width=48)
    assert fingerprint(Adapted(arch)) != fingerprint(RandomCheckpoint(arch))


def test_it_depends_on_the_bits_that_are_computed_with(tmp_path: Path) -> None:
    arch = architecture()
    whole = open_checkpoint(str(write_hf(tmp_path, arch, random_tensors(arch))))
    found: list[Checkpoint] = [whole, whole.rounded_to("bfloat16"), whole.rounded_to("float16")]
    assert len({fingerprint(checkpoint) for checkpoint in found}) == 3
