"""Attention and MLP sublayers, one or several in a call: norms, products, attention, activation and the residual.

T rows, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ppserve.model.backend import StepInputs
from ppserve.model.cpu.attention import BlockAttention
from ppserve.model.cpu.kernels.memory import address
from ppserve.model.cpu.kernels.work import jobs_of
from ppserve.model.cpu.thread_pool import ThreadPool


class FusedSublayers:
    """The bits of the operators that they are made of, without what torch needs to call them one by one.

    jobs: of each its kind, one of `kernels.work`, and its table. parts: what the tables have the addresses of.
    """

    def __init__(
        self, jobs: list[tuple[int, NDArray[np.int64]]], parts: tuple[object, ...], thread_pool: ThreadPool
    ) -> None:
        self.jobs, self._parts, self._thread_pool = jobs, parts, thread_pool
        self._listed = jobs_of(*jobs)
        self._address = address(self._listed)

    @classmethod
    def joined(cls, several: Sequence[FusedSublayers]) -> FusedSublayers:
        """One after the other."""
        return cls([job for each in several for job in each.jobs], tuple(several), several[0]._thread_pool)

    def __call__(self, hidden_TD: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        hidden_TD = hidden_TD.contiguous()
        out_TD = torch.empty_like(hidden_TD)
        places = table_of(inputs), hidden_TD.data_ptr(), out_TD.data_ptr()
        self._thread_pool.run(self._address, len(self.jobs), *places)
        return out_TD


def table_of(inputs: StepInputs) -> int:
    """The address of the step's table."""
    assert isinstance(inputs.attend, BlockAttention), "inputs are built for the cache of this backend"
    return inputs.attend.seen_by_kernels
