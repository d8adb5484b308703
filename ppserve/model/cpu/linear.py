"""Linear layers whose weights are packed once. A row's result does not depend on the other rows.

T rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch

from ppserve.model.checkpoint import Matrix
from ppserve.model.cpu.huge_pages import HugePages
from ppserve.model.cpu.kernels.memory import address
from ppserve.model.cpu.kernels.tile_code import MicroKernel
from ppserve.model.cpu.kernels.work import LINEAR, as_table, jobs_of
from ppserve.model.cpu.rooms import Rooms
from ppserve.model.cpu.team import Team
from ppserve.model.cpu.weights import PackedWeights


class PackedLinear:
    """One product. Rows come and go in float32."""

    def __init__(
        self,
        weight_NK: Matrix,
        bias_N: torch.Tensor | None,
        precision: str,
        kind: MicroKernel,
        team: Team,
        rooms: Rooms,
        memory: HugePages,
    ) -> None:
        self.num_outputs, self.num_inputs = weight_NK.shape
        self.packed = PackedWeights(weight_NK, bias_N, precision, kind, memory)
        self.num_bytes = self.packed.num_bytes
        self._kind, self._team, self._rooms = kind, team, rooms
        self._table = as_table(self.packed.seen_by_kernels, (self.num_inputs,))
        self._jobs = jobs_of((LINEAR, self._table))
        rooms.fit_rows(self.packed.seen_by_kernels)

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        num_rows = x_TK.shape[0]
        x_TK = x_TK.contiguous()
        room, kept = self._rooms.room(num_rows)
        step = as_table(room)
        y_TN = torch.empty(self._kind.padded_rows(num_rows), self.packed.num_padded_outputs)
        self._team.run(address(self._jobs), 1, address(step), x_TK.data_ptr(), y_TN.data_ptr())
        del kept
        return y_TN[:num_rows, : self.num_outputs]
