"""Keys and values in main memory, laid out for the attention kernels.

L layers whose attention is on this stage, B blocks, H heads of this rank, d features, p positions of a block. Each
block and head has a cell of keys, groups of 16 positions as (d, 16), and a cell of values, panels of 16 features
as (p, 16); in int8 both end with a float32 scale for each position:

    keys_LBHc    (L, B, H, bytes of a cell of keys)
    values_LBHc  (L, B, H, bytes of a cell of values)

Padding to a multiple of 16 is never read as a key and its results are never used as features.
"""

from __future__ import annotations

import torch

from ppserve.core.architecture import Architecture, StageLayout
from ppserve.model.backend import Attend, StepInputs, StepRows
from ppserve.model.cpu.attention import BlockAttention
from ppserve.model.cpu.kernels.attention_tile import GROUP, AttentionKernel
from ppserve.model.cpu.kernels.memory import aligned
from ppserve.model.cpu.kernels.work import CacheShape
from ppserve.model.cpu.prefault import Prefaulter
from ppserve.model.cpu.scratch_memory import ScratchMemory
from ppserve.model.cpu.thread_pool import ThreadPool


def padded(size: int) -> int:
    """`size` rounded up to whole groups or panels."""
    return -(-size // GROUP) * GROUP


def cell_bytes(head_size: int, block_size: int, element_bytes: int) -> tuple[int, int]:
    """Bytes of one block and head: of its keys, of its values."""
    scales = 4 * padded(block_size) if element_bytes == 1 else 0
    keys, values = padded(block_size) * head_size, padded(head_size) * block_size
    return keys * element_bytes + scales, values * element_bytes + scales


def block_bytes(arch: Architecture, layout: StageLayout, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes on this rank, padding included."""
    heads = layout.heads(arch).width
    return len(layout.attentions) * heads * sum(cell_bytes(arch.head_size, block_size, dtype.itemsize))


class CpuCache:
    """A `KVCache`. num_ahead: so many blocks have memory before they are used; 0 where it comes as they are."""

    device = torch.device("cpu")

    def __init__(
        self,
        arch: Architecture,
        layout: StageLayout,
        num_blocks: int,
        block_size: int,
        kind: AttentionKernel,
        workers: tuple[ThreadPool, ScratchMemory],
        *,
        num_ahead: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._kind, self._workers = kind, workers
        cells = cell_bytes(arch.head_size, block_size, kind.element_bytes)
        num_heads = layout.heads(arch).width
        shape = (len(layout.attentions), num_blocks, num_heads)
        self.keys_LBHc, self.values_LBHc = (torch.from_numpy(aligned((*shape, cell), "uint8")) for cell in cells)
        self._shape = CacheShape(
            keys=self.keys_LBHc.data_ptr(),
            values=self.values_LBHc.data_ptr(),
            key_layer=num_blocks * num_heads * cells[0],
            value_layer=num_blocks * num_heads * cells[1],
            num_heads=num_heads,
            head_size=arch.head_size,
            block_size=block_size,
            key_cell=cells[0],
            value_cell=cells[1],
        )
        self.prefaulter = (
            Prefaulter(self.keys_LBHc, self.values_LBHc, least_ahead=num_ahead) if num_ahead else None
        )

    def inputs(self, rows: StepRows) -> StepInputs:
        return StepInputs.in_host_memory(rows, self.attention(rows))

    def attention(self, rows: StepRows) -> Attend:
        return BlockAttention(rows, self._shape, self._kind, *self._workers)

    def begin(self, rows: StepRows) -> None:
        if self.prefaulter is not None:
            self.prefaulter.mark_used(rows.highest_block + 1)
        for source, destination in rows.copies:
            self.keys_LBHc[:, destination] = self.keys_LBHc[:, source]
            self.values_LBHc[:, destination] = self.values_LBHc[:, source]

    def fill(self, value: float) -> None:
        number = getattr(torch, {1: "float32", 2: "bfloat16", 4: "float32"}[self._kind.element_bytes])
        for cells_LBHc in (self.keys_LBHc, self.values_LBHc):
            cells_LBHc.view(number).fill_(value)

    def close(self) -> None:
        if self.prefaulter is not None:
            self.prefaulter.close()
