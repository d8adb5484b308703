"""Fingerprints: equal for the same weights, other ones for weights that were trained further."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ppserve.model.checkpoint import WHOLE, Checkpoint, TensorPart, tensor_shapes
from ppserve.model.checkpoint.opening import open_checkpoint
from ppserve.model.checkpoint.tensors import fingerprint
from tests.model.checkpoint.writers import architecture, random_tensors, write_hf, write_llmc, write_nanogpt
from tests.model.random_checkpoint import RandomCheckpoint
from tests.model.random_checkpoint import architecture as of_random


def test_one_model_in_all_formats_has_one(tmp_path: Path) -> None:
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


def test_little_of_a_matrix_is_read() -> None:
    sizes: list[int] = []

    class Counting(RandomCheckpoint):
        def tensor(self, name: str, part: TensorPart) -> torch.Tensor:  # type: ignore[override]
            sizes.append((read := super().tensor(name, part)).numel())
            return read

    arch = of_random(width=48)
    fingerprint(Counting(arch))
    assert max(sizes) == arch.inner_width, "vectors are read whole"
    assert sum(size > 3 * 64 for size in sizes) < len(sizes) / 2
