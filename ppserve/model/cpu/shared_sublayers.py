"""A tensor rank's part of attention and MLP sublayers. Where ranks share memory, all of a stage are one call, in
which the kernels gather; elsewhere each is two calls, with a gather behind either.

T rows, D width, d a rank's own of it, K inputs of the second product, k a rank's own of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ppserve.core.cut import Cut
from ppserve.model.backend import StepInputs
from ppserve.model.cpu.exchange import ExchangeSide
from ppserve.model.cpu.kernels.memory import address
from ppserve.model.cpu.kernels.products import Weights
from ppserve.model.cpu.kernels.work import COMPLETE, GATHER, PROJECT, as_table, jobs_of
from ppserve.model.cpu.sublayers import table_of
from ppserve.model.cpu.thread_pool import ThreadPool


class SharedSublayer:
    """A call up to the rows that the second product needs whole, and one for that product and the residual.

    job, table, parts: as of `FusedSublayers`, for the first call. second: weights of the second product. cuts: of
    its inputs and of the results.
    """

    def __init__(
        self,
        job: int,
        table: NDArray[np.int64],
        second: Weights,
        cuts: tuple[Cut, Cut],
        parts: tuple[object, ...],
        thread_pool: ThreadPool,
    ) -> None:
        self.between, self.columns = between, columns = cuts
        projection = as_table(second, (between.size, columns.size, columns.first, columns.width))
        gather, complete = as_table(between.widths), as_table(columns.widths)
        self.jobs = [(job, table), (GATHER, gather), (PROJECT, projection), (COMPLETE, complete)]
        self._parts, self.thread_pool = parts, thread_pool
        self._lists = jobs_of(self.jobs[0]), jobs_of(self.jobs[2])
        self._first, self._second = map(address, self._lists)

    def __call__(self, hidden_TD: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        hidden_TD, step, run = hidden_TD.contiguous(), table_of(inputs), self.thread_pool.run
        num_rows, x = len(hidden_TD), hidden_TD.data_ptr()
        own_Tk = torch.empty(num_rows, self.between.width)
        run(self._first, 1, step, x, own_Tk.data_ptr())
        rows_TK = inputs.gather.all(own_Tk, self.between)
        own_Td = torch.empty(num_rows, self.columns.width, dtype=hidden_TD.dtype)
        run(self._second, 1, step, x, own_Td.data_ptr(), rows_TK.data_ptr())
        return inputs.gather.all(own_Td, self.columns)


class SharedSublayers:
    """One after the other."""

    def __init__(self, several: Sequence[SharedSublayer]) -> None:
        self._several, self._thread_pool = several, several[0].thread_pool
        jobs = [job for each in several for job in each.jobs]
        self._listed, self._num_jobs = jobs_of(*jobs), len(jobs)
        self._address = address(self._listed)
        self._inner = max(each.between.size for each in several)
        self._row_bytes = 4 * max(max(each.between.widths + each.columns.widths) for each in several)

    def __call__(self, hidden_TD: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        num_rows, gather = len(hidden_TD), inputs.gather
        if not isinstance(gather, ExchangeSide) or num_rows * self._row_bytes > gather.most_bytes:
            for each in self._several:
                hidden_TD = each(hidden_TD, inputs)
            return hidden_TD
        hidden_TD = hidden_TD.contiguous()
        out_TD, rows_TK = torch.empty_like(hidden_TD), torch.empty(num_rows, self._inner)
        places = (each.data_ptr() for each in (hidden_TD, out_TD, rows_TK))
        self._thread_pool.run(self._address, self._num_jobs, table_of(inputs), *places, gather.seen_by_kernels)
        gather.check()
        return out_TD
