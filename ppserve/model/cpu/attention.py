"""Attention over blocks of keys and values: what a step of the kernels works on, prepared ahead of it.

T rows, D width, E = 3D.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch

from ppserve.model.backend import StepRows
from ppserve.model.cpu.kernels.attention import StepSlices
from ppserve.model.cpu.kernels.attention_tile import AttentionKernel
from ppserve.model.cpu.kernels.memory import address
from ppserve.model.cpu.kernels.work import ATTEND, CacheShape, as_table, jobs_of
from ppserve.model.cpu.scratch_memory import ScratchMemory
from ppserve.model.cpu.thread_pool import ThreadPool


class BlockAttention:
    """One step. seen_by_kernels: the address of what they read of it, kept as long as this object is."""

    def __init__(
        self,
        rows: StepRows,
        shape: CacheShape,
        kind: AttentionKernel,
        thread_pool: ThreadPool,
        scratch_memory: ScratchMemory,
    ) -> None:
        self._thread_pool = thread_pool
        self._width = shape.num_heads * shape.head_size
        self.num_rows = len(rows.slots_T)
        arrays = rows.slots_T, rows.first_row_S, rows.num_rows_S, rows.start_S, rows.tables, rows.table_begin_S
        together = np.concatenate(arrays)
        *places, _ = accumulate((array.nbytes for array in arrays), initial=address(together))
        slices = StepSlices(self.num_rows, len(rows.start_S), *places)
        most_positions = int((rows.start_S + rows.num_rows_S).max())
        own, memory = scratch_memory.attention_scratch(kind, shape, most_positions)
        scratch, room_arrays = scratch_memory.scratch(self.num_rows)
        table = as_table(scratch, slices, shape, *own)
        self._kept = (together, memory, room_arrays, table)
        self.seen_by_kernels = address(table)

    def __call__(self, layer: int, qkv_TE: torch.Tensor, scale: float) -> torch.Tensor:
        """By itself; a fused sublayer has it inside."""
        table = as_table((layer, np.float32(scale)))
        jobs = jobs_of((ATTEND, table))
        # One row more: whole vectors are loaded, also at the end of the last row.
        padded_TE = torch.nn.functional.pad(qkv_TE, (0, 0, 0, 1))
        mixed_TD = torch.empty(self.num_rows, self._width)
        self._thread_pool.run(address(jobs), 1, self.seen_by_kernels, padded_TE.data_ptr(), mixed_TD.data_ptr())
        return mixed_TD
