"""What backends whose norms, activations and plain linears are torch's have in common.

T rows, D width, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch.nn.functional import gelu, layer_norm, linear, relu, silu

from ppserve.core.architecture import Architecture, StageLayout
from ppserve.model.backend import AttentionParts, Linear, MLPParts, Operator, Precision, Read, Sublayer
from ppserve.model.checkpoint import Matrix

ACTIVATIONS: dict[str, Operator] = {
    "gelu_new": partial(gelu, approximate="tanh"),
    "gelu_fast": partial(gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(gelu, approximate="tanh"),
    "gelu": gelu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": relu,
    "silu": silu,
    "tanh": torch.tanh,
}
"""The activations of the GPT-2 family by Hugging Face's names, and what each of them means."""


class TorchBackend:
    """Weights, arithmetic and hidden states in one dtype; keys and values in it or, if asked for, another."""

    more_rows: tuple[int, ...] = ()
    more_head_rows: tuple[int, ...] = ()

    def __init__(self, device: torch.device, dtype: str, kv_dtype: str | None = None) -> None:
        one: torch.dtype = getattr(torch, dtype)
        self.device = device
        self.precision = Precision(one, getattr(torch, kv_dtype or dtype), one, one)

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.precision.weights).to(self.device)

    def linear(self, weight_NK: Matrix, bias_N: torch.Tensor | None) -> Linear:
        return PlainLinear(self.stored(weight_NK[:]), bias_N)

    def norm(self, weight_D: torch.Tensor, bias_D: torch.Tensor | None, epsilon: float) -> Operator:
        return partial(layer_norm, normalized_shape=weight_D.shape, weight=weight_D, bias=bias_D, eps=epsilon)

    def activation(self, name: str) -> Operator:
        return ACTIVATIONS[name]

    def fused_attention(self, parts: AttentionParts) -> Sublayer | None:
        return None

    def fused_mlp(self, parts: MLPParts) -> Sublayer | None:
        return None

    def fused_head(self, norm: Operator, linear: Linear) -> Read | None:
        return None

    def joined(self, sublayers: Sequence[Sublayer | None]) -> Sublayer | None:
        return None

    def block_bytes(self, arch: Architecture, layout: StageLayout, block_size: int) -> int:
        return block_size * layout.kv_bytes_per_token(arch, self.precision.kv.itemsize)


class PlainLinear:
    """Weights as they are."""

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
        self._weight_NK, self._bias_N = weight_NK, bias_N
        self.num_outputs, self.num_inputs = weight_NK.shape
        self.num_bytes = weight_NK.nbytes

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        return linear(x_TK, self._weight_NK, self._bias_N)
