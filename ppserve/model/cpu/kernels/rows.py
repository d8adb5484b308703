"""What is done with rows between products: they are copied, packed, normed and activated. Each row is computed by
itself, always in the same order.

T rows, K inputs.
"""
# mypy: ignore-errors
# (numba types these functions from their arguments)

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ppserve.model.compiled.jit import inlined
from ppserve.model.compiled.lanes import (
    exp,
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
from ppserve.model.cpu.kernels.products import pack
from ppserve.model.cpu.kernels.storage import keep, read_one, read_panel

_ZERO, _HALF, _ONE, _TWO = np.float32(0), np.float32(0.5), np.float32(1), np.float32(2)
_MOST_INT8, _SMALLEST_ROW = np.float32(127), np.float32(1e-30)
_WHOLE = np.float32(1.5 * 2**23)


@inlined
def scale_for_int8(values, count):
    """Return two factors: the scale, which turns int8 numbers back into `count` values of a row, and its inverse,
    which turns these values into int8 numbers.

    Values that are all below 1e-30 become zeros. If a value is not finite, the scale is a NaN, so everything that
    is computed from the row is a NaN, too.
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
    """Put a row into its tile. values: the address of its float32 numbers, with zeros up to whole chunks."""
    tile, r = row // rows.tile_rows, row % rows.tile_rows
    row_bytes = kind.row_bytes
    place = rows.words + (tile * chunks * rows.tile_rows + r) * row_bytes
    inputs, panels = kind.chunk_inputs, kind.chunk_inputs // 16
    panel_bytes = (row_bytes - 8 * kind.has_groups) // panels
    if kind.is_integer and not kind.has_groups:
        scale, inverse = scale_for_int8(values, chunks * inputs)
        store_one(rows.scales, row, scale)
    for chunk in range(chunks):
        if kind.has_groups:
            scale, inverse = scale_for_int8(values + 4 * chunk * inputs, inputs)
        total = splat(_ZERO)
        for panel in range(panels):
            here = load(values, chunk * inputs + 16 * panel)
            if kind.is_integer:
                here = fma(here, splat(inverse), splat(_WHOLE))
                total = total + (here - splat(_WHOLE))
            pack(kind, place + panel * panel_bytes, here)
        if kind.has_groups:
            store_one(place + row_bytes, -2, scale)
            store_one(place + row_bytes, -1, sum_lanes(total) * scale)
        place += rows.tile_rows * row_bytes


@inlined
def read_row(stored, source, count, values, padded):
    """Copy `count` numbers as float32 to another address, with zeros up to `padded`, a multiple of 16."""
    whole = count // 16 * 16
    for i in range(0, whole, 16):
        store(values, i, read_panel(stored, source + i * stored.element_bytes))
    for i in range(whole, padded, 16):
        store(values, i, splat(_ZERO))
    for i in range(whole, count):
        store_one(values, i, read_one(stored, source + i * stored.element_bytes))


@inlined
def add_row(stored, source, count, values, to):
    """Write to `to` the `count` numbers at `source` plus as many float32 values."""
    whole, size = count // 16 * 16, stored.element_bytes
    for i in range(0, whole, 16):
        keep(stored, to + i * size, read_panel(stored, source + i * size) + load(values, i))
    for i in range(whole, count):
        keep(stored, to + i * size, read_one(stored, source + i * size) + load_one(values, i))


class Norm(NamedTuple):
    """A layer norm; if is_rms, an RMS norm. weight, bias: addresses of float32, with zeros up to whole cache
    lines."""

    weight: int
    bias: int
    width: int
    epsilon: np.float32
    is_rms: int


@inlined
def _mean(norm, values):
    total = splat(_ZERO)
    for i in range(0, norm.width, 16):
        total = total + load(values, i)
    return sum_lanes(total) / np.float32(norm.width)


@inlined
def normalise(norm, values):
    """Norm a row in place. Its sums are made in 16 lanes, which are then added by halves. values: the address of
    the row, with zeros up to a multiple of 16."""
    size = np.float32(norm.width)
    mean = splat(_ZERO if norm.is_rms else _mean(norm, values))
    squares = splat(_ZERO)
    for i in range(0, norm.width, 16):
        apart = load(values, i) - mean
        if i + 16 > norm.width:
            apart = keep_first(apart, norm.width - i, splat(_ZERO))
        squares = fma(apart, apart, squares)
    factor = splat(_ONE / np.sqrt(sum_lanes(squares) / size + norm.epsilon))
    for i in range(0, norm.width, 16):
        store(values, i, fma((load(values, i) - mean) * factor, load(norm.weight, i), load(norm.bias, i)))


@inlined
def multiply_row(values, factors, count):
    """Multiply `count` float32 numbers by as many others, in place."""
    whole = count // 16 * 16
    for i in range(0, whole, 16):
        store(values, i, load(values, i) * load(factors, i))
    for i in range(whole, count):
        store_one(values, i, load_one(values, i) * load_one(factors, i))


@inlined
def rotate_row(values, rotation, count):
    """Rotate `count` numbers in place, in pairs of one from each half. rotation: the pairs' cosines, then their
    sines."""
    half = count // 2
    for i in range(half):
        cosine, sine = load_one(rotation, i), load_one(rotation, half + i)
        x, y = load_one(values, i), load_one(values, half + i)
        store_one(values, i, x * cosine - y * sine)
        store_one(values, half + i, y * cosine + x * sine)


GATE, TANH, RELU, EXACT_GELU = range(4)


class Activation(NamedTuple):
    """An activation. form: GATE is x sigmoid(linear x + cubic x³), which is SiLU, and GELU in its tanh and quick
    forms. TANH is 2 sigmoid(2x) - 1. EXACT_GELU is x Φ(x), where Φ is the normal distribution function."""

    form: int
    linear: np.float32
    cubic: np.float32


@inlined
def _gate(x, linear, cubic):
    slope = fma(x * x, splat(cubic), splat(linear))
    return x / (splat(_ONE) + exp(splat(_ZERO) - x * slope))


_NEAR, _SLOPE = np.float32(14), np.float32(0.35)
_T1, _T2, _T3 = np.float32(0.1396215707), np.float32(0.1398590803), np.float32(0.1198524311)
_T4, _T5, _T6 = np.float32(0.10543295), np.float32(-0.02293717861), np.float32(0.158929348)
_T7, _T8, _T9 = np.float32(-0.2555046082), np.float32(0.143872261), np.float32(-0.02912587114)


@inlined
def _exact_gelu(x):
    """Return x Φ(x) per lane, with an error of at most 5e-7 of its size, or of 1e-37; a NaN where x is not finite.

    x Φ(x) = max(x, 0) - a Q(a), where a = |x| and Q(a) = 1 - Φ(a) = erfc(a / √2) / 2. So no digits are lost where
    Φ(x) is small. Q(a) is exp(-a² / 2) times a function that falls slowly, for which a polynomial in t = 1 / (1 +
    0.35 a) stands. It was fitted by least squares, whose weights were changed until the greatest relative error,
    4e-8, was as small as possible.
    """
    a = where_greater(splat(_ZERO), x, splat(_ZERO) - x, x)
    near = where_greater(a, splat(_NEAR), splat(_NEAR), a)  # beyond it Q is 0
    t = splat(_ONE) / fma(near, splat(_SLOPE), splat(_ONE))
    p = fma(splat(_T9), t, splat(_T8))
    p = fma(p, t, splat(_T7))
    p = fma(p, t, splat(_T6))
    p = fma(p, t, splat(_T5))
    p = fma(p, t, splat(_T4))
    p = fma(p, t, splat(_T3))
    p = fma(p, t, splat(_T2))
    p = fma(p, t, splat(_T1)) * t
    square = near * near
    lost = fma(near, near, splat(_ZERO) - square)  # what the rounding of the square has lost
    q = exp(square * splat(-_HALF)) * fma(lost * splat(-_HALF), p, p)
    return where_greater(x, splat(_ZERO), x, splat(_ZERO)) - a * q


@inlined
def activate(activation, values, count):
    """Apply the activation to `count` values, a multiple of 16."""
    if activation.form == GATE:
        for i in range(0, count, 16):
            store(values, i, _gate(load(values, i), activation.linear, activation.cubic))
    elif activation.form == TANH:
        for i in range(0, count, 16):
            x = load(values, i) * splat(_TWO)
            store(values, i, splat(_TWO) / (splat(_ONE) + exp(splat(_ZERO) - x)) - splat(_ONE))
    elif activation.form == RELU:
        for i in range(0, count, 16):
            x = load(values, i)
            # Only what is smaller than 0 is changed: a NaN stays.
            store(values, i, where_greater(splat(_ZERO), x, splat(_ZERO), x))
    else:
        for i in range(0, count, 16):
            store(values, i, _exact_gelu(load(values, i)))
