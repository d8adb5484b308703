"""A model is equal in every format: identical canonical tensors, architecture and fingerprint."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch

from ppserve.core.architecture import Architecture
from ppserve.model.checkpoint import Checkpoint, TensorPart
from ppserve.model.checkpoint.families import FAMILIES, tensor_shapes
from ppserve.model.checkpoint.family import ModelFamily
from ppserve.model.checkpoint.opening import open_checkpoint, read_architecture
from ppserve.model.checkpoint.tensors import fingerprint
from tests.model.checkpoint.writers import (
    WRITERS,
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
from tests.model.random_checkpoint import RandomCheckpoint, llama
from tests.model.random_checkpoint import architecture as of_random

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def check(checkpoint: Checkpoint, arch: Architecture, tensors: Tensors) -> None:
    assert checkpoint.architecture == arch
    for name in tensor_shapes(arch):
        read = checkpoint.tensor(name)
        assert read.dtype == tensors[name].dtype, name
        assert read.device.type == "cpu"
        assert torch.equal(read, tensors[name]), name
        read.zero_()
        assert torch.equal(checkpoint.tensor(name), tensors[name]), "it shares memory with the file"
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


def test_a_head_with_the_embeddings_bits_in_another_dtype_is_no_copy_of_it(tmp_path: Path) -> None:
    arch = architecture()
    tensors = random_tensors(arch, dtype=torch.bfloat16)
    state = hf_state(arch, tensors)
    state["lm_head.weight"] = tensors["wte.weight"].clone().view(torch.float16)
    write_hf_state(write_hf(tmp_path, arch, tensors), state)
    assert not open_checkpoint(str(tmp_path)).architecture.tied_embeddings


def test_a_checkpoint_is_of_the_dtype_of_most_numbers_not_of_most_tensors(tmp_path: Path) -> None:
    """Norms and biases are often float32 beside matrices that are not."""
    arch = architecture()
    tensors = random_tensors(arch, dtype=torch.bfloat16)
    mixed = {name: each.float() if each.ndim == 1 else each for name, each in tensors.items()}
    assert sum(each.ndim == 1 for each in mixed.values()) > len(mixed) / 2
    assert open_checkpoint(str(write_hf(tmp_path, arch, mixed))).stored_dtype == "bfloat16"


@pytest.mark.parametrize("version", [3, 5])
@pytest.mark.parametrize("vocab_size", [37, 48])
def test_llmc(tmp_path: Path, version: int, vocab_size: int) -> None:
    arch = architecture(vocab_size=vocab_size, padded_vocab_size=48)
    tensors = random_tensors(arch, dtype=torch.bfloat16 if version == 5 else torch.float32)
    path = write_llmc(tmp_path / "gpt2_124M.bin", arch, tensors, version)
    check(open_checkpoint(str(path)), arch, tensors)
    check(open_checkpoint(str(tmp_path)), arch, tensors)
    assert read_architecture(str(path)) == arch


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("model", ["gpt2", "llama", "qwen2", "qwen3"])
def test_gguf(tmp_path: Path, model: str, kind: str) -> None:
    """The numbers that were converted, rounded as the package rounds them; parts are those of the whole."""
    arch = architecture(width=64, inner_width=256, vocab_size=37, padded_vocab_size=40)
    if model != "gpt2":
        more = {"qkv_biases": model == "qwen2", "qk_norms": model == "qwen3"}
        arch = llama(width=64, head_width=16 if model == "qwen3" else 32, inner_width=96, vocab_size=64, **more)
    tensors = random_tensors(arch)
    path = write_gguf(tmp_path / "model.gguf", arch, tensors, kind, model)
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.architecture == arch == read_architecture(str(tmp_path))
    assert checkpoint.stored_quantization == ("int4" if kind in ("Q4_0", "Q4_1") else "none")
    part = TensorPart((slice(3, 9), slice(40, 60)), slice(5, 40))
    for name, shape in tensor_shapes(arch).items():
        whole, expected = checkpoint.tensor(name), tensors[name]
        if len(shape) == 2:
            raw = gguf.GGMLQuantizationType[kind]
            expected = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(expected.numpy(), raw), raw))
        assert torch.equal(whole.float(), expected), name
        if name.endswith(("qkv.weight", "attn.q.weight")):
            assert torch.equal(checkpoint.tensor(name, part), part.select(whole))


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_names_in_a_gguf_are_those_of_its_package(family: ModelFamily) -> None:
    models = [model for model, name in gguf.MODEL_ARCH_NAMES.items() if name in family.model_types]
    maps = [gguf.get_tensor_name_map(model, 1).mapping for model in models]
    known = {theirs: of[1] for mapping in maps for theirs, of in mapping.items()}
    base = family.layers.partition(".")[0]
    for theirs, stored in family.names.values():
        names = [known.get(f"{before}{theirs}") for before in (f"{family.layers}0.", f"{base}.", "")]
        assert stored in names or f"blk.0.{stored}" in names


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "module._orig_mod."])
def test_nanogpt(tmp_path: Path, prefix: str, biases: bool) -> None:
    arch = architecture(biases=biases, activation="gelu")
    tensors = random_tensors(arch)
    path = write_nanogpt(tmp_path / "ckpt.pt", arch, tensors, prefix=prefix)
    check(open_checkpoint(str(path)), arch, tensors)
    check(open_checkpoint(str(tmp_path)), arch, tensors)
    assert read_architecture(str(path)) == arch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_while_reading_is_rounding_what_was_read(tmp_path: Path, dtype: torch.dtype) -> None:
    arch = architecture(width=640, num_heads=8, num_layers=1, inner_width=2560)
    checkpoint = open_checkpoint(str(write_hf(tmp_path, arch, random_tensors(arch))))
    rounded = checkpoint.rounded_to(DTYPE_NAMES[dtype])
    check(rounded, arch, {name: checkpoint.tensor(name).to(dtype) for name in tensor_shapes(arch)})
    assert checkpoint.stored_dtype == "float32"


@pytest.mark.parametrize("container", ["bin", "legacy"])
def test_views_and_transposes_are_read_right(tmp_path: Path, container: str) -> None:
    """Tensors that share a storage, or lie in it in another order, are legitimate."""
    arch = architecture()
    tensors = random_tensors(arch)
    state = hf_state(arch, tensors)
    state["transformer.wpe.weight"] = torch.cat([torch.zeros(5, 20), tensors["wpe.weight"]])[5:]
    state["lm_head.weight"] = state["transformer.wte.weight"] = tensors["wte.weight"].T.contiguous().T
    write_hf_state(write_hf(tmp_path, arch, tensors, container=container), state, container=container)
    check(open_checkpoint(str(tmp_path)), arch, tensors)


def test_one_model_in_all_formats_has_one_fingerprint(tmp_path: Path) -> None:
    arch = architecture(width=40, num_heads=4, inner_width=160)
    tensors = random_tensors(arch)
    places = [write(tmp_path / kind, arch, tensors) for kind, write in WRITERS.items()]
    assert len({fingerprint(open_checkpoint(str(place))) for place in places}) == 1
    rounded = (open_checkpoint(str(places[0])).rounded_to(dtype) for dtype in DTYPE_NAMES.values())
    assert len(set(map(fingerprint, rounded))) == len(DTYPE_NAMES) == 3, "of the bits that are computed with"


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        *((name, slice(None)) for name in tensor_shapes(of_random(num_layers=1))),
        # Adapters of queries, of keys or of values alone.
        *(("h.0.attn.qkv.weight", slice(first, first + 48)) for first in (0, 48, 96)),
    ],
)
def test_a_single_tensor_that_was_trained_further_shows(name: str, rows: slice) -> None:
    class TrainedOn(RandomCheckpoint):
        def _whole(self, asked: str) -> torch.Tensor:
            whole = super()._whole(asked)
            if asked == name:
                whole[rows] *= 1.001
            return whole

    arch = of_random(num_layers=1, tied_embeddings=False)
    assert fingerprint(TrainedOn(arch)) != fingerprint(RandomCheckpoint(arch))
