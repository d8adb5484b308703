"""Which attention kernels a kernel variant has."""

from __future__ import annotations

from ppserve.model.cpu.kernels.attention_tile import ELEMENT_BYTES, AttentionKernel
from ppserve.model.cpu.kernels.variants import NEEDS

__all__ = ["ELEMENT_BYTES", "attention_kernels"]

# As many sums as the registers hold: 16 registers of AVX2, 32 of AVX-512.
_SHAPES = {"avx512": (16, 4, (1, 3, 6)), "portable": (8, 1, (1, 3, 6))}


def attention_kernels(storage: str, variant: str) -> list[AttentionKernel]:
    """Those that `variant` includes, the best first."""
    included = list(NEEDS)[: list(NEEDS).index(variant) + 1]
    return [AttentionKernel(storage, *shape) for name, shape in _SHAPES.items() if name in included]
