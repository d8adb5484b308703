"""One product, packed and multiplied, for tests of the kernels."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from ppserve.model.cpu.kernels.memory import address, aligned
from ppserve.model.cpu.kernels.operations import OPERATIONS
from ppserve.model.cpu.kernels.products import PackedRows, count_tile_rows, multiply_rows, pack_rows
from ppserve.model.cpu.kernels.tile_code import MicroKernel
from ppserve.model.cpu.kernels.weights import PackedWeights

Floats = NDArray[np.float32]


class Product:
    """y = x Wᵀ + b by one micro-kernel; cuts: where the panels are cut into calls, as threads would."""

    def __init__(self, kind: MicroKernel, precision: str, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.kind = kind
        self.packed = PackedWeights(weight, bias, precision, kind)

    def __call__(self, x: Floats, cuts: tuple[int, ...] = ()) -> Floats:
        kind, weights = self.kind, self.packed.seen_by_kernels
        count, depth = x.shape
        tile_rows = count_tile_rows(kind, count)
        padded = -(-count // tile_rows) * tile_rows
        steps, inputs = OPERATIONS[kind.operation].steps, OPERATIONS[kind.operation].inputs
        words, scales = aligned(padded * weights.chunks * 16 * steps, np.int32), aligned(padded, np.float32)
        values, y = (
            aligned(weights.chunks * 16 * inputs, np.float32),
            aligned((padded, weights.outputs), np.float32),
        )
        rows = PackedRows(address(words), address(scales), count, tile_rows)
        x = np.ascontiguousarray(x)
        pack_rows(kind, address(x), depth, rows, weights.chunks, address(values), 0, count)
        bounds = (0, *cuts, weights.outputs // 16)
        for first, end in pairwise(bounds):
            multiply_rows(kind, weights, rows, address(y), first, end)
        return y[:count, : self.packed.num_outputs]
