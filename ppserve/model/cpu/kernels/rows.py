"""What happens to rows between products, each row by itself and in one order: copied, packed, quantised.

T rows, K inputs.
"""
# mypy: ignore-errors
# (numba types these functions from their arguments; mypy cannot see through its intrinsics)

from __future__ import annotations

import numpy as np

from ppserve.model.cpu.jit import inlined
from ppserve.model.cpu.kernels.memory import LINE_BYTES
from ppserve.model.cpu.kernels.micro_kernel import pack
from ppserve.model.cpu.vector import (
    fma,
    keep_first,
    load,
    load_one,
    max_lanes,
    splat,
    store,
    store_one,
    sum_lanes,
    where_greater,
)

_ZERO, _MOST_INT8 = np.float32(0), np.float32(127)
_WHOLE = np.float32(1.5 * 2**23)
_SMALLEST_ROW = np.float32(1e-30)


@inlined
def scale_for_int8(values, count):
    """(what int8 numbers are multiplied by to become `count` values, what the values are multiplied by to become
    them).

    Values all below 1e-30 count as zeros. One that is not finite makes them all NaN.
    """
    most, not_finite = splat(_ZERO), splat(_ZERO)
    for i in range(0, count, 16):
        here = load(values, i)
        if i + 16 > count:
            here = keep_first(here, count - i, splat(_ZERO))
        size = where_greater(splat(_ZERO), here, splat(_ZERO) - here, here)
        most = where_greater(size, most, size, most)
        not_finite = fma(here, splat(_ZERO), not_finite)
    greatest, poison = max_lanes(most), sum_lanes(not_finite)
    if greatest < _SMALLEST_ROW:
        return poison, _ZERO
    return greatest / _MOST_INT8 + poison, _MOST_INT8 / greatest


@inlined
def pack_row(kind, values, rows, chunks, row):
    """Put a row into its tile. values: the address of its float32, with zeros up to whole chunks."""
    tile, r = row // rows.tile_rows, row % rows.tile_rows
    row_bytes = LINE_BYTES * kind.steps
    place = rows.words + (tile * chunks * rows.tile_rows + r) * row_bytes
    inputs = 16 * kind.inputs
    if kind.inputs == 4:
        scale, inverse = scale_for_int8(values, chunks * inputs)
        store_one(rows.scales, row, scale)
    for chunk in range(chunks):
        for part in range(kind.inputs):
            here = load(values, chunk * inputs + 16 * part)
            if kind.inputs == 4:
                here = fma(here, splat(inverse), splat(_WHOLE))
            pack(kind, place + part * row_bytes // kind.inputs, here)
        place += rows.tile_rows * row_bytes


@inlined
def copy_row(source, count, values, padded):
    """Copy `count` float32 from one address to another, with zeros up to `padded`, a multiple of 16."""
    whole = count // 16 * 16
    for i in range(0, whole, 16):
        store(values, i, load(source, i))
    for i in range(whole, padded, 16):
        store(values, i, splat(_ZERO))
    for i in range(whole, count):
        store_one(values, i, load_one(source, i))
