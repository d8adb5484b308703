"""What backends whose norms, activations and plain linears are torch's have in common.

T rows, D width, E = 3D, K inputs, N outputs; c, d, n a tensor rank's own columns of heads, hidden states and inner
rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import gelu, layer_norm, linear, relu, silu

from ppserve.core.architecture import Architecture, StageLayout
from ppserve.model.backend import (
    AttentionWeights,
    Head,
    LayerNorm,
    Linear,
    MLPWeights,
    Precision,
    Sublayer,
)
from ppserve.model.checkpoint import Matrix
from ppserve.model.inputs import StepInputs

Operator = Callable[[torch.Tensor], torch.Tensor]
"""A norm or an activation of rows."""

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""x Wᵀ + b."""

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


Attend = Callable[[int, torch.Tensor, float], torch.Tensor]
"""The attention of one step: its number among those of the stage, (T, E) rows and the factor on Q·K give (T, c).
It keeps the rows' keys and values, then attends to them and to all before them."""


@dataclass(frozen=True, slots=True)
class AttendInputs(StepInputs):
    """Inputs of a cache that attends by a call of its own."""

    attend: Attend


def _norm(weights: LayerNorm) -> Operator:
    shape = weights.weight_D.shape
    return partial(
        layer_norm, normalized_shape=shape, weight=weights.weight_D, bias=weights.bias_D, eps=weights.epsilon
    )


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

    def attention(self, weights: AttentionWeights) -> Sublayer:
        norm, own = _norm(weights.norm), weights.columns.own

        def residual(x_TD: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
            assert isinstance(inputs, AttendInputs)
            gather = inputs.gather
            own_Tc = inputs.attend(weights.number, weights.qkv(norm(x_TD)), weights.scale)
            own_Td = x_TD[:, own] + weights.proj(gather.all(own_Tc, weights.heads))
            return gather.all(own_Td, weights.columns)

        return residual

    def mlp(self, weights: MLPWeights) -> Sublayer:
        norm, activate, own = _norm(weights.norm), ACTIVATIONS[weights.activation], weights.columns.own

        def residual(x_TD: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
            gather = inputs.gather
            own_Tn = activate(weights.expand(norm(x_TD)))
            own_Td = x_TD[:, own] + weights.contract(gather.all(own_Tn, weights.inner))
            return gather.all(own_Td, weights.columns)

        return residual

    def head(self, norm: LayerNorm, linear: Linear) -> Head:
        normed = _norm(norm)
        return lambda hidden_RD: linear(normed(hidden_RD)).float()

    def block_bytes(self, arch: Architecture, layout: StageLayout, block_size: int) -> int:
        return block_size * layout.kv_bytes_per_token(arch, self.precision.kv.itemsize)


class PlainLinear:
    """Weights as they are, in torch's product or another."""

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, product: Product = linear) -> None:
        self._weight_NK, self._bias_N, self._product = weight_NK, bias_N, product
        self.num_outputs, self.num_inputs = weight_NK.shape
        self.num_bytes = weight_NK.nbytes

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        return self._product(x_TK, self._weight_NK, self._bias_N)
