"""The loops behind `activations`, in place on flat arrays: every element alike, sixteen at a time."""
# mypy: ignore-errors
# (numba types these functions from their arguments; mypy cannot see through its intrinsics)

from __future__ import annotations

import math

import numpy as np

from ppserve.model.cpu.jit import inlined, kernel
from ppserve.model.cpu.vector import exp, fma, load, splat, store

_ZERO, _ONE, _TWO = np.float32(0), np.float32(1), np.float32(2)
_HALF, _ROOT_HALF = np.float32(0.5), math.sqrt(0.5)


@inlined
def _gate(x, linear, cubic, is_tanh):
    if is_tanh:
        x, factor = x * splat(_TWO), splat(_TWO)
    else:
        factor = x
    slope = fma(x * x, splat(cubic), splat(linear))
    gated = factor / (splat(_ONE) + exp(splat(_ZERO) - x * slope))
    return gated - splat(_ONE) if is_tanh else gated


@kernel
def gate(values, linear, cubic, is_tanh) -> None:
    """x ← x sigmoid(linear x + cubic x³): GELU in its tanh and quick forms, and SiLU; or tanh x, which is
    2 sigmoid(2x) - 1."""
    rest = np.zeros(16, np.float32)
    whole = len(values) // 16 * 16
    left = len(values) - whole
    for i in range(left):
        rest[i] = values[whole + i]
    for i in range(0, whole + 16, 16):
        if i < whole:
            store(values, i, _gate(load(values, i), linear, cubic, is_tanh))
        else:
            store(rest, 0, _gate(load(rest, 0), linear, cubic, is_tanh))
    for i in range(left):
        values[whole + i] = rest[i]


@kernel
def exact_gelu(values) -> None:
    """x ← x Φ(x), Φ the normal distribution function in float64."""
    for i in range(len(values)):
        x = values[i]
        values[i] = _HALF * x * np.float32(1.0 + math.erf(x * _ROOT_HALF))
