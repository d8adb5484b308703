"""Linear layers whose weights are packed once. A row's result does not depend on the other rows.

T rows, K inputs, N outputs.
"""

from __future__ import annotations

import numpy as np
import torch

from ppserve.model.cpu.kernels.memory import address, aligned
from ppserve.model.cpu.kernels.products import PackedRows, count_tile_rows, multiply_rows, pack_rows
from ppserve.model.cpu.kernels.tile_code import PANEL, MicroKernel
from ppserve.model.cpu.kernels.weights import PackedWeights
from ppserve.model.cpu.threads import Threads

_PANELS_PER_THREAD = 8
"""Fewer than this, and waking a thread costs more than it saves."""


class PackedLinear:
    """One micro-kernel's product. Rows come and go in float32."""

    def __init__(
        self,
        weight_NK: torch.Tensor,
        bias_N: torch.Tensor | None,
        precision: str,
        kind: MicroKernel,
        threads: Threads,
    ) -> None:
        self.num_outputs, self.num_inputs = weight_NK.shape
        self._packed = PackedWeights(weight_NK, bias_N, precision, kind)
        self._kind, self._threads = kind, threads
        self.num_bytes = self._packed.num_bytes
        num_panels = self._packed.seen_by_kernels.outputs // PANEL
        pairs = threads.even_bounds(num_panels // 2, _PANELS_PER_THREAD // 2)
        self._bounds = [2 * pair for pair in pairs]

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        kind, weights = self._kind, self._packed.seen_by_kernels
        num_rows, depth = x_TK.shape
        tile_rows = count_tile_rows(kind, num_rows)
        padded = -(-num_rows // tile_rows) * tile_rows
        words = aligned(padded * weights.chunks * PANEL * kind.steps, np.int32)
        scales, values = aligned(padded, np.float32), aligned(weights.chunks * PANEL * kind.inputs, np.float32)
        y_TN = torch.empty(padded, weights.outputs)
        rows = PackedRows(address(words), address(scales), num_rows, tile_rows)
        x = x_TK.contiguous()
        pack_rows(kind, x.data_ptr(), depth, rows, weights.chunks, address(values), 0, num_rows)
        self._threads.run(multiply_rows, (kind, weights, rows, y_TN.data_ptr()), self._bounds)
        return y_TN[:num_rows, : self.num_outputs].contiguous()
