"""A checkpoint in memory: any architecture, seeded random weights under the canonical names."""

from __future__ import annotations

import zlib
from pathlib import Path

import torch

from ppserve.core.architecture import Architecture
from ppserve.model.checkpoint import WHOLE, TensorPart


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


class RandomCheckpoint:
    """Weights large enough that logits of different tokens differ clearly; each depends on its name only."""

    path = Path("random")

    def __init__(self, arch: Architecture, seed: int = 0, stored_dtype: str = "float32") -> None:
        self.architecture = arch
        self.stored_dtype = stored_dtype
        self._seed = seed
        self.asked: list[str] = []

    def tensor(self, name: str, part: TensorPart = WHOLE) -> torch.Tensor:
        """The tensor called `name` (see `ppserve.model.checkpoint`)."""
        self.asked.append(name)
        return part.select(self._whole(name)).clone()

    def _whole(self, name: str) -> torch.Tensor:
        if name == "lm_head.weight" and self.architecture.tied_embeddings:
            name = "wte.weight"
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        tensor = torch.randn(self._shape(name), generator=generator)
        part, kind = name.split(".")[-2:]
        if kind == "bias":
            tensor *= 0.1
        elif part in ("ln_1", "ln_2", "ln_f"):
            tensor = 1 + 0.1 * tensor
        elif part in ("wte", "wpe", "lm_head"):
            tensor *= 0.3
        else:
            tensor *= 1.5 / tensor.shape[1] ** 0.5
        return tensor.to(getattr(torch, self.stored_dtype))

    def _shape(self, name: str) -> tuple[int, ...]:
        arch = self.architecture
        width, inner = arch.width, arch.inner_width
        part, kind = name.removeprefix("h.").lstrip("0123456789.").rsplit(".", 1)
        weights = {
            "wte": (arch.padded_vocab_size, width),
            "wpe": (arch.max_positions, width),
            "lm_head": (arch.padded_vocab_size, width),
            "attn.c_attn": (3 * width, width),
            "attn.c_proj": (width, width),
            "mlp.c_fc": (inner, width),
            "mlp.c_proj": (width, inner),
        }
        if part.startswith("ln_"):
            return (width,)
        return weights[part] if kind == "weight" else weights[part][:1]
