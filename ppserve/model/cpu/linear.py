"""Linear layers whose weights are packed once. A row's result does not depend on the other rows.

T rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch

from ppserve.model.checkpoint import Matrix
from ppserve.model.cpu.kernels.tile_code import MicroKernel
from ppserve.model.cpu.kernels.weights import PackedWeights
from ppserve.model.cpu.kernels.work import LINEAR, as_table
from ppserve.model.cpu.rooms import Rooms
from ppserve.model.cpu.team import Team


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
    ) -> None:
        self.num_outputs, self.num_inputs = weight_NK.shape
        self.packed = PackedWeights(weight_NK, bias_N, precision, kind)
        self.num_bytes = self.packed.num_bytes
        self._most_rows, self._team, self._rooms = kind.rows[-1], team, rooms
        self._table = as_table(self.packed.seen_by_kernels, (self.num_inputs,))
        rooms.fit_rows(self.packed.seen_by_kernels)

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        num_rows = x_TK.shape[0]
        x_TK = x_TK.contiguous()
        room, kept = self._rooms.room(num_rows)
        step = as_table(room)
        y_TN = torch.empty(num_rows + self._most_rows, self.packed.seen_by_kernels.outputs)
        self._team.run(LINEAR, self._table.ctypes.data, step.ctypes.data, x_TK.data_ptr(), y_TN.data_ptr())
        del kept
        return y_TN[:num_rows, : self.num_outputs]
