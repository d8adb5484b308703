"""Attention and MLP sublayers in one call each: norms, products, attention, activation and the residual.

T rows, D width.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ppserve.model.backend import StepInputs
from ppserve.model.cpu.attention import BlockAttention
from ppserve.model.cpu.kernels.memory import address
from ppserve.model.cpu.team import Team


class FusedSublayer:
    """The bits of the operators that it is made of, without what torch needs to call them one by one.

    job: one of `kernels.work`. table: of the sublayer. parts: what the table has the addresses of.
    """

    def __init__(self, job: int, table: NDArray[np.int64], parts: tuple[object, ...], team: Team) -> None:
        self._job, self._table, self._kept, self._team = job, address(table), (table, parts), team

    def __call__(self, hidden_TD: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        hidden_TD = hidden_TD.contiguous()
        out_TD = torch.empty_like(hidden_TD)
        self._team.run(self._job, self._table, table_of(inputs), hidden_TD.data_ptr(), out_TD.data_ptr())
        return out_TD


def table_of(inputs: StepInputs) -> int:
    """The address of the step's table."""
    assert isinstance(inputs.attend, BlockAttention), "inputs are built for the cache of this backend"
    return inputs.attend.seen_by_kernels
