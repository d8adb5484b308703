"""The activations of the GPT-2 family by Hugging Face's names, equal for a row whatever surrounds it.

torch's CPU operators treat the end of a flattened tensor with scalar code that differs in the last bit,
so on the CPU these are kernels that treat every element alike.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ppserve.model.activation_kernel import EXACT_GELU, QUICK_GELU, RELU, SILU, TANH, TANH_GELU, activate

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

_KINDS = {
    "gelu_new": TANH_GELU,
    "gelu_fast": TANH_GELU,
    "gelu_pytorch_tanh": TANH_GELU,
    "gelu": EXACT_GELU,
    "quick_gelu": QUICK_GELU,
    "relu": RELU,
    "silu": SILU,
    "tanh": TANH,
}


def activation_for(name: str, device: torch.device) -> Activation:
    """The activation called `name`; on the CPU it takes float32 and works in place."""
    if device.type != "cpu":
        return TORCH[name]
    kind = _KINDS[name]

    def in_place(x: torch.Tensor) -> torch.Tensor:
        activate(x.view(-1).numpy(), kind)
        return x

    return in_place
