"""Linear layers whose weights are packed once. A row's result does not depend on the other rows.

T rows, K inputs, N outputs.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ppserve.model.checkpoint import Matrix
from ppserve.model.cpu.huge_pages import HugePages
from ppserve.model.cpu.kernels.memory import address
from ppserve.model.cpu.kernels.tile_code import MicroKernel
from ppserve.model.cpu.kernels.work import LINEAR, READ, as_table, jobs_of
from ppserve.model.cpu.norm import CpuNorm
from ppserve.model.cpu.scratch_memory import ScratchMemory
from ppserve.model.cpu.thread_pool import ThreadPool
from ppserve.model.cpu.weights import PackedWeights


class PackedLinear:
    """One product. Rows come and go in float32."""

    def __init__(
        self,
        weight_NK: Matrix,
        bias_N: torch.Tensor | None,
        precision: str,
        kind: MicroKernel,
        thread_pool: ThreadPool,
        scratch_memory: ScratchMemory,
        memory: HugePages,
    ) -> None:
        self.num_outputs, self.num_inputs = weight_NK.shape
        self.packed = PackedWeights(weight_NK, bias_N, precision, kind, memory)
        self.num_bytes = self.packed.num_bytes
        self._kind, self._thread_pool, self._scratch_memory = kind, thread_pool, scratch_memory
        self._table = as_table(self.packed.seen_by_kernels, (self.num_inputs,))
        self._jobs = jobs_of((LINEAR, self._table))
        scratch_memory.fit_rows(self.packed.seen_by_kernels)

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        x_TK = x_TK.contiguous()
        return self.last_of(self._jobs, x_TK.shape[0], x_TK.data_ptr())

    def last_of(self, jobs: NDArray[np.int64], num_rows: int, x: int, rows: int = 0) -> torch.Tensor:
        """What a job puts out that ends with this product. x, rows: addresses, as `kernels.work` takes them."""
        scratch, kept = self._scratch_memory.scratch(num_rows)
        step = as_table(scratch)
        y_TN = torch.empty(self._kind.padded_rows(num_rows), self.packed.num_padded_outputs)
        self._thread_pool.run(address(jobs), 1, address(step), x, y_TN.data_ptr(), rows)
        del kept
        return y_TN[:num_rows, : self.num_outputs]


class FusedHead:
    """Final norm and LM head, of some rows of hidden states (T, D), in one call."""

    def __init__(self, norm: CpuNorm, linear: PackedLinear) -> None:
        self._table = as_table(norm.seen_by_kernels, linear.packed.seen_by_kernels)
        self._jobs = jobs_of((READ, self._table))
        self._norm, self._linear = norm, linear

    def __call__(self, hidden_TD: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
        hidden_TD, rows_R = hidden_TD.contiguous(), rows_R.contiguous()
        return self._linear.last_of(self._jobs, len(rows_R), hidden_TD.data_ptr(), rows_R.data_ptr())
