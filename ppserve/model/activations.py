"""The activations of the GPT-2 family by Hugging Face's names, as torch operators: what each of them means."""

from __future__ import annotations

import torch

from ppserve.model.backend import Operator

_functional = torch.nn.functional

ACTIVATIONS: dict[str, Operator] = {
    "gelu_new": lambda x: _functional.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: _functional.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: _functional.gelu(x, approximate="tanh"),
    "gelu": _functional.gelu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": _functional.relu,
    "silu": _functional.silu,
    "tanh": torch.tanh,
}
