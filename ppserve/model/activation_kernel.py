"""The loops behind `activations`: every element alike, sixteen at a time."""
# mypy: ignore-errors
# (numba types these functions from their arguments; mypy cannot see through its intrinsics)

from __future__ import annotations

import math

import numpy as np

from ppserve.model.jit import inlined, kernel
from ppserve.model.vector import exp, fma, load, splat, store, where_greater

TANH_GELU, QUICK_GELU, RELU, SILU, TANH, EXACT_GELU = range(6)

_ZERO, _ONE, _TWO = np.float32(0), np.float32(1), np.float32(2)
_TWICE_ROOT, _CUBIC = np.float32(2 * math.sqrt(2 / math.pi)), np.float32(0.044715)
_QUICK = np.float32(1.702)
_HALF, _ROOT_HALF = np.float32(0.5), math.sqrt(0.5)


@inlined
def _sigmoid(x):
    return splat(_ONE) / (splat(_ONE) + exp(splat(_ZERO) - x))


@inlined
def _activate_lanes(x, kind):
    """One activation on sixteen values; every kind but the exact GELU."""
    if kind == TANH_GELU:  # x/2 (1 + tanh u) = x sigmoid(2u)
        return x * _sigmoid(splat(_TWICE_ROOT) * (x * fma(x * x, splat(_CUBIC), splat(_ONE))))
    if kind == QUICK_GELU:
        return x * _sigmoid(splat(_QUICK) * x)
    if kind == SILU:
        return x * _sigmoid(x)
    if kind == TANH:
        return fma(splat(_TWO), _sigmoid(splat(_TWO) * x), splat(-_ONE))
    return where_greater(splat(_ZERO), x, splat(_ZERO), x)


@kernel
def activate(values, kind) -> None:
    """In place over a flat array."""
    whole = len(values) // 16 * 16
    if kind == EXACT_GELU:
        for i in range(len(values)):
            x = values[i]
            values[i] = _HALF * x * np.float32(1.0 + math.erf(x * _ROOT_HALF))
        return
    for i in range(0, whole, 16):
        store(values, i, _activate_lanes(load(values, i), kind))
    if whole < len(values):
        rest = np.zeros(16, np.float32)
        rest[: len(values) - whole] = values[whole:]
        store(rest, 0, _activate_lanes(load(rest, 0), kind))
        values[whole:] = rest[: len(values) - whole]
