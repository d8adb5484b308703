"""Activations as kernels, equal for a row whatever surrounds it.

torch's CPU operators treat the end of a flattened tensor with scalar code that differs in the last bit; these
treat every element alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from ppserve.model.backend import Operator
from ppserve.model.cpu.activation_kernel import exact_gelu, gate

_ROOT = 2 * math.sqrt(2 / math.pi)

_GATES = {
    "gelu_new": (_ROOT, 0.044715 * _ROOT),
    "gelu_fast": (_ROOT, 0.044715 * _ROOT),
    "gelu_pytorch_tanh": (_ROOT, 0.044715 * _ROOT),
    "quick_gelu": (1.702, 0.0),
    "silu": (1.0, 0.0),
    "tanh": (1.0, 0.0),
}
"""Those that are x sigmoid(ax + bx³), or for tanh 2 sigmoid(2x) - 1, and their a and b."""


def activation_for(name: str) -> Operator:
    """The activation called `name`, in place on contiguous float32."""
    if name == "relu":
        return torch.relu_  # exact, hence alike whichever code takes the end of a tensor
    if name == "gelu":
        return _in_place(exact_gelu)
    linear, cubic = _GATES[name]
    return _in_place(gate, np.float32(linear), np.float32(cubic), name == "tanh")


def _in_place(kernel: Callable[..., None], *settings: object) -> Operator:
    def activate(x: torch.Tensor) -> torch.Tensor:
        kernel(x.view(-1).numpy(), *settings)
        return x

    return activate
