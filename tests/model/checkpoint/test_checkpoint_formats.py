"""The same model in every format: identical canonical tensors and architecture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ppserve.core.architecture import Architecture
from ppserve.model.checkpoint import Checkpoint, tensor_shapes
from ppserve.model.checkpoint.opening import open_checkpoint, read_architecture
from tests.model.checkpoint.writers import (
    Tensors,
    architecture,
    hf_state,
    random_tensors,
    write_hf,
    write_hf_state,
    write_llmc,
    write_nanogpt,
)

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
