"""One product, packed and multiplied, for tests of the kernels."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from ppserve.model.checkpoint import MatrixInMemory
from ppserve.model.compiled.jit import kernel
from ppserve.model.cpu.kernels.memory import Arena, address, aligned
from ppserve.model.cpu.kernels.operations import OPERATIONS
from ppserve.model.cpu.kernels.products import Scratch, micro_kernels, multiply
from ppserve.model.cpu.kernels.rows import pack_row, read_row
from ppserve.model.cpu.kernels.storage import Storage
from ppserve.model.cpu.kernels.tile_code import PANEL, MicroKernel
from ppserve.model.cpu.kernels.variants import features
from ppserve.model.cpu.linear import PackedWeights

Floats = NDArray[np.float32]


def arithmetic(precision: str, variant: str) -> str:
    """Equal for the kernel variants of this CPU that compute the same bits."""
    return OPERATIONS[micro_kernels(precision, variant, features())[0].operation].arithmetic


def same(one: Floats, other: Floats) -> bool:
    """Return whether both have the same bits."""
    return np.array_equal(one.view(np.uint32), other.view(np.uint32))


@kernel
def pack_rows(kind, stored, x, depth, rows, chunks, values) -> None:  # type: ignore[no-untyped-def]
    for row in range(rows.num_rows):
        read_row(stored, x + 4 * row * depth, depth, values, chunks * kind.chunk_inputs)
        pack_row(kind, values, rows, chunks, row)


@kernel
def multiply_rows(kind, weights, rows, y, first_panel, end_panel) -> None:  # type: ignore[no-untyped-def]
    multiply(kind, weights, rows, y, first_panel, end_panel)


class Product:
    """y = x Wᵀ + b by one micro-kernel; cuts: where the panels are cut into calls, as threads would."""

    def __init__(self, kind: MicroKernel, precision: str, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.kind = kind
        self.packed = PackedWeights(MatrixInMemory(weight), bias, getattr(torch, precision), kind, Arena())

    def __call__(self, x: Floats, cuts: tuple[int, ...] = ()) -> Floats:
        kind, weights = self.kind, self.packed.seen_by_kernels
        count, depth = x.shape
        tile_rows = kind.tile_rows(count)
        padded = -(-count // tile_rows) * tile_rows
        words = aligned(padded * weights.chunks * kind.row_bytes // 4, np.int32)
        scales = aligned(padded, np.float32)
        values = aligned(weights.chunks * kind.chunk_inputs, np.float32)
        y = aligned(padded * weights.outputs, np.float32).reshape(padded, -1)
        rows = Scratch(count, tile_rows, address(words), address(scales), 0, 0, 0, 0)
        x = np.ascontiguousarray(x)
        pack_rows(kind, Storage("float32"), address(x), depth, rows, weights.chunks, address(values))
        for first, end in pairwise((0, *cuts, weights.outputs // PANEL)):
            multiply_rows(kind, weights, rows, address(y), first, end)
        return y[:count, : self.packed.num_outputs]
