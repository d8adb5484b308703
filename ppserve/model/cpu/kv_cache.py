"""Keys and values in main memory, laid out for the attention kernel.

L layers whose attention is on this stage, B blocks, H heads, d features, p positions of a block. Within a block
and head, keys lie with the position innermost and values with the feature innermost, so that the kernel reads both
in whole vectors:

    keys_LBHdp    (L, B, H, head_size,            padded block size)
    values_LBHpd  (L, B, H, block size, padded head size)

Padding to a multiple of 16 is never read as a key and its results are never used as features.
"""

from __future__ import annotations

import math

import numpy
import torch

from ppserve.core.architecture import Architecture, StageLayout
from ppserve.model.backend import Attend, StepRows
from ppserve.model.cpu.attention import BlockAttention
from ppserve.model.cpu.prefault import Prefaulter
from ppserve.model.cpu.threads import Threads
from ppserve.model.cpu.vector import WIDTH

_ALIGNMENT = 64
# What a server that has just started has memory ready for.
_TOKENS_AHEAD = 2048


def padded(size: int) -> int:
    """`size` rounded up to whole vectors."""
    return -(-size // WIDTH) * WIDTH


def block_bytes(arch: Architecture, layout: StageLayout, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes on this stage, padding included."""
    numbers = arch.head_size * padded(block_size) + block_size * padded(arch.head_size)
    return len(layout.attentions) * arch.num_heads * numbers * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose memory is taken from the system only as blocks are written."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = numpy.zeros(num_bytes + _ALIGNMENT, numpy.uint8)  # calloc, where torch.zeros would write
    start = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(shape)


class CpuCache:
    """A `KVCache` of float32 or bfloat16. prefaults: have memory ready before blocks are used."""

    device = torch.device("cpu")

    def __init__(
        self,
        arch: Architecture,
        layout: StageLayout,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        threads: Threads,
        *,
        prefaults: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._threads = threads
        shape = (len(layout.attentions), num_blocks, arch.num_heads)
        self.keys_LBHdp = _zeros((*shape, arch.head_size, padded(block_size)), dtype)
        self.values_LBHpd = _zeros((*shape, block_size, padded(arch.head_size)), dtype)
        least_ahead = -(-_TOKENS_AHEAD // block_size)
        self.prefaulter = (
            Prefaulter(self.keys_LBHdp, self.values_LBHpd, least_ahead=least_ahead) if prefaults else None
        )

    def attention(self, rows: StepRows) -> Attend:
        return BlockAttention(self.keys_LBHdp, self.values_LBHpd, rows, self._threads)

    def begin(self, rows: StepRows) -> None:
        if self.prefaulter is not None:
            self.prefaulter.mark_used(rows.highest_block + 1)
        for source, destination in rows.copies:
            self.keys_LBHdp[:, destination] = self.keys_LBHdp[:, source]
            self.values_LBHpd[:, destination] = self.values_LBHpd[:, source]

    def fill(self, value: float) -> None:
        self.keys_LBHdp.fill_(value)
        self.values_LBHpd.fill_(value)

    def close(self) -> None:
        if self.prefaulter is not None:
            self.prefaulter.close()
