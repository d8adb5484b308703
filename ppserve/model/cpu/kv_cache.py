"""Keys and values in main memory, laid out for the attention kernels.

L layers whose attention is on this stage, B blocks, H heads of this rank, d features, p positions of a block. Each
block and head has two cells. The cell of keys consists of groups of 16 positions, each (d, 16). The cell of values
consists of panels of 16 features, each (p, 16). In int8, both end with a float32 scale for each position:

    keys_LBHc    (L, B, H, bytes of a cell of keys)
    values_LBHc  (L, B, H, bytes of a cell of values)

Positions and features are padded to a multiple of 16. Padding is never attended to, and its results are never
read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from ppserve.core.architecture import Architecture, StageLayout
from ppserve.model.cpu.kernels.attention import CacheShape, StepSlices
from ppserve.model.cpu.kernels.attention_tile import GROUP, AttentionKernel
from ppserve.model.cpu.kernels.memory import address, huge_pages, start_populating
from ppserve.model.cpu.kernels.work import as_table
from ppserve.model.cpu.scratch import ScratchMemory
from ppserve.model.inputs import Gather, StepInputs, StepRows
from ppserve.model.rotary import RotaryTable, rotations_of


def _padded(size: int) -> int:
    """Return `size` rounded up to whole groups or panels."""
    return -(-size // GROUP) * GROUP


def cell_bytes(head_size: int, block_size: int, element_bytes: int) -> tuple[int, int]:
    """Return the bytes of one block and head: those of its keys, and those of its values."""
    scales = 4 * _padded(block_size) if element_bytes == 1 else 0
    keys, values = _padded(block_size) * head_size, _padded(head_size) * block_size
    return keys * element_bytes + scales, values * element_bytes + scales


def block_bytes(arch: Architecture, layout: StageLayout, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes that one block takes on this rank, padding included."""
    heads = layout.kv_heads(arch).width
    return len(layout.attentions) * heads * sum(cell_bytes(arch.head_size, block_size, dtype.itemsize))


@dataclass(frozen=True, slots=True)
class CpuInputs(StepInputs):
    """A step's inputs as the kernels read them."""

    step: int
    """The address of the step's table, as `kernels.work` reads it."""
    kept: tuple[object, ...]
    """The table, and the arrays whose addresses it has: they must live as long as the table is read."""


class CpuCache:
    """Keys and values in main memory: a `KVCache`."""

    def __init__(
        self,
        arch: Architecture,
        layout: StageLayout,
        blocks: tuple[int, int],
        kind: AttentionKernel,
        scratch: ScratchMemory,
        *,
        populate: bool,
    ) -> None:
        """blocks: their number, and the positions of one. populate: begin to take the memory from the system now,
        rather than when it is first written."""
        self.num_blocks, self.block_size = blocks
        self._kind, self._scratch = kind, scratch
        self._rotary_tables = tuple(map(RotaryTable, arch.rotaries))
        cells = cell_bytes(arch.head_size, self.block_size, kind.element_bytes)
        shape = len(layout.attentions), self.num_blocks, layout.kv_heads(arch).width
        self.keys_LBHc, self.values_LBHc = (
            torch.from_numpy(huge_pages(math.prod(shape) * cell)).view(*shape, cell) for cell in cells
        )
        if populate:
            for cells_LBHc in (self.keys_LBHc, self.values_LBHc):
                start_populating(cells_LBHc.numpy().reshape(-1))
        self._shape = CacheShape(
            keys=self.keys_LBHc.data_ptr(),
            values=self.values_LBHc.data_ptr(),
            layer_cells=math.prod(shape[1:]),
            num_heads=shape[2],
            queries_per_kv_head=arch.queries_per_kv_head,
            head_size=arch.head_size,
            block_size=self.block_size,
            key_cell=cells[0],
            value_cell=cells[1],
        )

    def inputs(self, rows: StepRows, gather: Gather) -> CpuInputs:
        step, kept = self._step_table(rows)
        return CpuInputs(
            rows=rows,
            token_ids_T=torch.from_numpy(rows.token_ids_T),
            positions_T=torch.from_numpy(rows.positions_T),
            read_rows_R=torch.from_numpy(rows.read_rows),
            gather=gather,
            step=step,
            kept=kept,
        )

    def _step_table(self, rows: StepRows) -> tuple[int, tuple[object, ...]]:
        arrays = rows.slots_T, rows.first_row_S, rows.num_rows_S, rows.start_S, rows.tables, rows.table_begin_S
        together = np.concatenate(arrays)
        places = accumulate((array.nbytes for array in arrays), initial=address(together))
        slots, first_row, num_rows, start, tables, table_begin, _ = places
        rotations_RTd = rotations_of(self._rotary_tables, rows.positions_T)
        slices = StepSlices(
            num_rows=len(rows.slots_T),
            num_slices=len(rows.start_S),
            rotations=0 if rotations_RTd is None else address(rotations_RTd),
            slots=slots,
            first_row=first_row,
            rows=num_rows,
            start=start,
            tables=tables,
            table_begin=table_begin,
        )
        most_positions = int((rows.start_S + rows.num_rows_S).max())
        scratch, scratch_arrays = self._scratch.of_step(slices.num_rows)
        attention, attention_arrays = self._scratch.of_attention(self._kind, self._shape, most_positions)
        table = as_table(scratch, slices, self._shape, *attention)
        return address(table), (table, together, rotations_RTd, scratch_arrays, attention_arrays)

    def fill(self, value: float) -> None:
        number = getattr(torch, {1: "float32", 2: "bfloat16", 4: "float32"}[self._kind.element_bytes])
        for cells_LBHc in (self.keys_LBHc, self.values_LBHc):
            cells_LBHc.view(number).fill_(value)
