"""A checkpoint in memory: any architecture, seeded random weights under the canonical names."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import torch

from ppserve.core.architecture import Architecture, Rotary
from ppserve.model.checkpoint import WHOLE, Checkpoint, TensorPart
from ppserve.model.checkpoint.families import tensor_shapes


def architecture(
    *, num_layers: int = 2, width: int = 48, num_heads: int = 4, vocab_size: int = 211, **changes: object
) -> Architecture:
    """A small architecture; `changes` are any other fields."""
    fields = {
        "max_positions": 128,
        "padded_vocab_size": vocab_size,
        "inner_width": 4 * width,
    } | changes
    return Architecture(num_layers, width, num_heads, vocab_size=vocab_size, **fields)  # type: ignore[arg-type]


def llama(*, heads: int = 4, kv_heads: int = 2, head_width: int = 12, **changes: object) -> Architecture:
    """A small Llama; `changes` are any other fields."""
    fields = {
        "inner_width": 104,
        "activation": "silu",
        "biases": False,
        "tied_embeddings": False,
        "family": "llama",
        "kv_heads": kv_heads,
        "head_width": head_width,
        "rotary": Rotary(tuple(float(np.float32(10000 ** (-2 * i / head_width))) for i in range(head_width // 2))),
        "is_gated": True,
    }
    return architecture(num_heads=heads, **fields | changes)


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
        elif part in ("ln_1", "ln_2", "ln_f", "q_norm", "k_norm"):
            tensor = 1 + 0.1 * tensor
        elif part in ("wte", "wpe", "lm_head"):
            tensor *= 0.3
        else:
            tensor *= 1.5 / tensor.shape[1] ** 0.5
        return tensor.to(getattr(torch, self.stored_dtype))
