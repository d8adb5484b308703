"""Activations, in place on float32 at an address: every element alike, sixteen at a time."""
# mypy: ignore-errors
# (numba types these functions from their arguments; mypy cannot see through its intrinsics)

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ppserve.model.compiled.jit import inlined
from ppserve.model.compiled.lanes import exp, fma, load, splat, store, where_greater

_ZERO, _ONE, _TWO = np.float32(0), np.float32(1), np.float32(2)
_HALF = np.float32(0.5)

GATE, TANH, RELU, EXACT_GELU = range(4)


class Activation(NamedTuple):
    """form: GATE is x sigmoid(linear x + cubic x³): GELU in its tanh and quick forms, and SiLU. TANH is
    2 sigmoid(2x) - 1. EXACT_GELU is x Φ(x), Φ the normal distribution function."""

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
    """x Φ(x) per lane, within 5e-7 of its own size, or of 1e-37; a NaN where x is not finite.

    x Φ(x) = max(x, 0) - a Q(a), where a = |x| and Q(a) = 1 - Φ(a) = erfc(a / √2) / 2, so nothing is lost where
    Φ(x) is small. Q(a) = exp(-a² / 2) times a function that falls slowly: a polynomial in t = 1 / (1 + 0.35 a),
    fitted here by least squares that are weighted anew until its greatest relative error, 4e-8, is as small as can
    be.
    """
    a = where_greater(splat(_ZERO), x, splat(_ZERO) - x, x)
    near = where_greater(a, splat(_NEAR), splat(_NEAR), a)  # Q is 0 from there on
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
    lost = fma(near, near, splat(_ZERO) - square)  # in rounding the square
    q = exp(square * splat(-_HALF)) * fma(lost * splat(-_HALF), p, p)
    return where_greater(x, splat(_ZERO), x, splat(_ZERO)) - a * q


@inlined
def activate(activation, values, count):
    """Of `count` values, a multiple of 16."""
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
            # What is not smaller than 0 stays, also a NaN.
            store(values, i, where_greater(splat(_ZERO), x, splat(_ZERO), x))
    else:
        for i in range(0, count, 16):
            store(values, i, _exact_gelu(load(values, i)))
