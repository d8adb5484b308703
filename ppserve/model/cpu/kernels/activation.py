"""Activations, in place on float32 at an address: every element alike, sixteen at a time."""
# mypy: ignore-errors
# (numba types these functions from their arguments; mypy cannot see through its intrinsics)

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ppserve.model.cpu.jit import inlined, kernel
from ppserve.model.cpu.vector import exp, fma, load, load_one, splat, store, store_one, where_greater

_ZERO, _ONE, _TWO = np.float32(0), np.float32(1), np.float32(2)
_HALF, _ROOT_HALF = np.float32(0.5), math.sqrt(0.5)

GATE, TANH, RELU, EXACT_GELU = range(4)


class Activation(NamedTuple):
    """form: GATE is x sigmoid(linear x + cubic x³): GELU in its tanh and quick forms, and SiLU. TANH is
    2 sigmoid(2x) - 1. EXACT_GELU is x Φ(x), Φ the normal distribution function in float64."""

    form: int
    linear: np.float32
    cubic: np.float32


@inlined
def _gate(x, linear, cubic):
    slope = fma(x * x, splat(cubic), splat(linear))
    return x / (splat(_ONE) + exp(splat(_ZERO) - x * slope))


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
        for i in range(count):
            x = load_one(values, i)
            store_one(values, i, _HALF * x * np.float32(1.0 + math.erf(x * _ROOT_HALF)))


@kernel
def activate_all(activation, values, count) -> None:
    """`activate`, for those who have only that to do."""
    activate(activation, values, count)
