"""A tensor rank's part of attention and MLP sublayers: two calls each, with a gather behind either.

T rows, D width, d a rank's own of it, K inputs of the second product, k a rank's own of them.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ppserve.core.cut import Cut
from ppserve.model.backend import StepInputs
from ppserve.model.cpu.kernels.memory import address
from ppserve.model.cpu.kernels.products import Weights
from ppserve.model.cpu.kernels.work import PROJECT, as_table, jobs_of
from ppserve.model.cpu.sublayers import table_of
from ppserve.model.cpu.team import Team


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
        team: Team,
    ) -> None:
        self._between, self._columns = between, columns = cuts
        projection = as_table(second, (between.size, columns.size, columns.first, columns.width))
        jobs = jobs_of((job, table)), jobs_of((PROJECT, projection))
        self._kept, self._team = (table, projection, *jobs, parts), team
        self._first, self._second = map(address, jobs)

    def __call__(self, hidden_TD: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        hidden_TD, step, run = hidden_TD.contiguous(), table_of(inputs), self._team.run
        num_rows, x = len(hidden_TD), hidden_TD.data_ptr()
        own_Tk = torch.empty(num_rows, self._between.width)
        run(self._first, 1, step, x, own_Tk.data_ptr())
        rows_TK = inputs.gather.all(own_Tk, self._between)
        own_Td = torch.empty(num_rows, self._columns.width, dtype=hidden_TD.dtype)
        run(self._second, 1, step, x, own_Td.data_ptr(), rows_TK.data_ptr())
        return inputs.gather.all(own_Td, self._columns)
