"""Activations as kernels, equal for a row whatever surrounds it.

torch's CPU operators treat the end of a flattened tensor with scalar code that differs in the last bit; these
treat every element alike.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from ppserve.model.cpu.kernels.activation import EXACT_GELU, GATE, RELU, TANH, Activation, activate_all

_ROOT = 2 * math.sqrt(2 / math.pi)

_FORMS = {
    "gelu_new": (GATE, _ROOT, 0.044715 * _ROOT),
    "gelu_fast": (GATE, _ROOT, 0.044715 * _ROOT),
    "gelu_pytorch_tanh": (GATE, _ROOT, 0.044715 * _ROOT),
    "quick_gelu": (GATE, 1.702, 0.0),
    "silu": (GATE, 1.0, 0.0),
    "tanh": (TANH, 0.0, 0.0),
    "relu": (RELU, 0.0, 0.0),
    "gelu": (EXACT_GELU, 0.0, 0.0),
}


class CpuActivation:
    """One of the names in `stock.ACTIVATIONS`. seen_by_kernels: what a fused sublayer needs of it."""

    def __init__(self, name: str) -> None:
        form, linear, cubic = _FORMS[name]
        self.seen_by_kernels = Activation(form, np.float32(linear), np.float32(cubic))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1)
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % 16))
        activate_all(self.seen_by_kernels, padded.data_ptr(), padded.numel())
        return padded[: flat.numel()].view(x.shape)
