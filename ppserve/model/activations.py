"""The activations of the GPT-2 family by Hugging Face's names, equal for a row whatever surrounds it.

torch's CPU operators treat the end of a flattened tensor with scalar code that differs in the last bit,
so on the CPU these are kernels that treat every element alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from ppserve.model.jit import inlined, kernel
from ppserve.model.vector import exp, fma, load, splat, store, where_greater

Floats = NDArray[np.float32]
Activation = Callable[[torch.Tensor], torch.Tensor]

_functional = torch.nn.functional

TORCH: dict[str, Activation] = {
    "gelu_new": lambda x: _functional.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: _functional.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: _functional.gelu(x, approximate="tanh"),
    "gelu": _functional.gelu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": _functional.relu,
    "silu": _functional.silu,
    "tanh": torch.tanh,
}
"""Every supported activation as torch operators: the way on CUDA, and the oracle for the kernels."""

_TANH_GELU, _QUICK_GELU, _RELU, _SILU, _TANH, _EXACT_GELU = range(6)
_KINDS = {
    "gelu_new": _TANH_GELU,
    "gelu_fast": _TANH_GELU,
    "gelu_pytorch_tanh": _TANH_GELU,
    "gelu": _EXACT_GELU,
    "quick_gelu": _QUICK_GELU,
    "relu": _RELU,
    "silu": _SILU,
    "tanh": _TANH,
}

_ZERO, _ONE, _TWO = np.float32(0), np.float32(1), np.float32(2)
_TWICE_ROOT, _CUBIC = np.float32(2 * math.sqrt(2 / math.pi)), np.float32(0.044715)
_QUICK = np.float32(1.702)
_HALF, _ROOT_HALF = np.float32(0.5), math.sqrt(0.5)


@inlined
def _sigmoid(x):  # type: ignore[no-untyped-def]
    return splat(_ONE) / (splat(_ONE) + exp(splat(_ZERO) - x))


@inlined
def activate_lanes(x, kind):  # type: ignore[no-untyped-def]
    """One activation on sixteen values; every kind but the exact GELU."""
    if kind == _TANH_GELU:  # x/2 (1 + tanh u) = x sigmoid(2u)
        return x * _sigmoid(splat(_TWICE_ROOT) * (x * fma(x * x, splat(_CUBIC), splat(_ONE))))
    if kind == _QUICK_GELU:
        return x * _sigmoid(splat(_QUICK) * x)
    if kind == _SILU:
        return x * _sigmoid(x)
    if kind == _TANH:
        return fma(splat(_TWO), _sigmoid(splat(_TWO) * x), splat(-_ONE))
    return where_greater(splat(_ZERO), x, splat(_ZERO), x)


@kernel
def _activate(values: Floats, kind: int) -> None:
    """In place over a flat array."""
    whole = len(values) // 16 * 16
    if kind == _EXACT_GELU:
        for i in range(len(values)):
            x = values[i]
            values[i] = _HALF * x * np.float32(1.0 + math.erf(x * _ROOT_HALF))
        return
    for i in range(0, whole, 16):
        store(values, i, activate_lanes(load(values, i), kind))
    if whole < len(values):
        rest = np.zeros(16, np.float32)
        rest[: len(values) - whole] = values[whole:]
        store(rest, 0, activate_lanes(load(rest, 0), kind))
        values[whole:] = rest[: len(values) - whole]


def activation_for(name: str, device: torch.device) -> Activation:
    """The activation called `name`; on the CPU it takes float32 and works in place."""
    if device.type != "cpu":
        return TORCH[name]
    kind = _KINDS[name]

    def activate(x: torch.Tensor) -> torch.Tensor:
        _activate(x.view(-1).numpy(), kind)
        return x

    return activate
