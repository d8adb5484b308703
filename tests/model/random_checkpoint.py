"""A checkpoint in memory: any architecture, seeded random weights under the canonical names."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch

from ppserve.core.architecture import Architecture
from ppserve.model.checkpoint import WHOLE, Checkpoint, TensorPart
from ppserve.model.checkpoint.families import tensor_shapes
from tests import architectures


def architecture(
    *, num_layers: int = 2, width: int = 48, num_heads: int = 4, vocab_size: int = 211, **changes: Any
) -> Architecture:
    """A small GPT-2; `changes` are any other fields."""
    fields = {"max_positions": 128, "inner_width": 4 * width} | changes
    return architectures.gpt2(num_layers, width, num_heads, vocab_size=vocab_size, **fields)


def llama(
    *,
    num_layers: int = 2,
    width: int = 48,
    heads: int = 4,
    kv_heads: int = 2,
    head_width: int = 12,
    **changes: Any,
) -> Architecture:
    """A small Llama; `changes` are any other fields."""
    fields = {"max_positions": 128, "vocab_size": 211, "inner_width": 104, "tied_embeddings": False} | changes
    return architectures.llama(num_layers, width, heads, kv_heads, head_width, **fields)


class RandomCheckpoint(Checkpoint):
    """Weights large enough that logits of different tokens differ clearly; each depends on its name only."""

    path = Path("random")

    def __init__(self, arch: Architecture, seed: int = 0, stored_dtype: str = "float32") -> None:
        self.architecture = arch
        self.stored_dtype = stored_dtype
        self._seed, self._shapes = seed, tensor_shapes(arch)
        self.asked: list[str] = []

    def tensor(self, name: str, part: TensorPart = WHOLE) -> torch.Tensor:
        """The tensor called `name` (see `ppserve.model.checkpoint`)."""
        self.asked.append(name)
        return part.select(self._whole(name)).clone()

    def _whole(self, name: str) -> torch.Tensor:
        if name == "lm_head.weight" and self.architecture.tied_embeddings:
            name = "wte.weight"
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        tensor = torch.randn(self._shapes[name], generator=generator)
        part, kind = name.split(".")[-2:]
        if kind == "bias":
            tensor *= 0.1
        elif part in ("ln_1", "post_ln_1", "ln_2", "post_ln_2", "ln_f", "q_norm", "k_norm"):
            tensor = 1 + 0.1 * tensor
        elif part in ("wte", "wpe", "lm_head"):
            tensor *= 0.3
        else:
            tensor *= 1.5 / tensor.shape[1] ** 0.5
        return tensor.to(getattr(torch, self.stored_dtype))
