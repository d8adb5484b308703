"""The keys and values of one stage: preallocated blocks, addressed by id, owned by nobody else.

L layers whose attention is on this stage, B blocks, H heads. Within a block and head, keys lie with the
position innermost and values with the feature innermost, so that the attention kernel reads both in whole
vectors:

    keys_LBHdp    (L, B, H, head_size,            padded block size)
    values_LBHpd  (L, B, H, block size, padded head size)

Padding to a multiple of 16 is never read as a key and its results are never used as features.
"""

from __future__ import annotations

import math

import numpy
import torch

from ppserve.core.architecture import Architecture, StageLayout
from ppserve.model.cpu.prefault import TakenAhead
from ppserve.model.cpu.vector import WIDTH

_ALIGNMENT = 64
# What a server that has just started has memory ready for.
_TOKENS_AHEAD = 2048


def padded(size: int) -> int:
    """`size` rounded up to whole vectors."""
    return -(-size // WIDTH) * WIDTH


def _element_bytes(dtype: str) -> int:
    element: torch.dtype = getattr(torch, dtype)
    return element.itemsize


def _zeros(shape: tuple[int, ...], element: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros whose memory, on the CPU, is taken from the system only as blocks are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=element, device=device)
    num_bytes = math.prod(shape) * element.itemsize
    memory = numpy.zeros(num_bytes + _ALIGNMENT, numpy.uint8)  # calloc, where torch.zeros would write
    start = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[start : start + num_bytes]).view(element).view(shape)


class KVCache:
    """Blocks of one stage; a block is written before it is read, so nothing is ever erased.

    dtype: `float32`, `bfloat16` or `float16` (CUDA only). takes_ahead: on the CPU, have the memory of blocks ready
    before they are used.
    """

    def __init__(
        self,
        arch: Architecture,
        layout: StageLayout,
        num_blocks: int,
        block_size: int,
        dtype: str,
        device: torch.device,
        *,
        takes_ahead: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (len(layout.attentions), num_blocks, arch.num_heads)
        element: torch.dtype = getattr(torch, dtype)
        self.keys_LBHdp = _zeros((*shape, arch.head_size, padded(block_size)), element, device)
        self.values_LBHpd = _zeros((*shape, block_size, padded(arch.head_size)), element, device)

        self._ahead: TakenAhead | None = None
        if takes_ahead and device.type == "cpu":
            least_ahead = -(-_TOKENS_AHEAD // block_size)
            self._ahead = TakenAhead(self.keys_LBHdp, self.values_LBHpd, least_ahead=least_ahead)

    def reach(self, highest_block: int) -> None:
        """Blocks up to this one are in use."""
        if self._ahead is not None:
            self._ahead.reach(highest_block + 1)

    @staticmethod
    def bytes_per_block(arch: Architecture, layout: StageLayout, block_size: int, dtype: str) -> int:
        """Bytes that one block takes on this stage, padding included."""
        keys = arch.head_size * padded(block_size)
        values = block_size * padded(arch.head_size)
        return len(layout.attentions) * arch.num_heads * (keys + values) * _element_bytes(dtype)

    def copy(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Copy blocks in the order given: (source, destination)."""
        for source, destination in copies:
            self.keys_LBHdp[:, destination] = self.keys_LBHdp[:, source]
            self.values_LBHpd[:, destination] = self.values_LBHpd[:, source]
