"""What backends share whose norms, activations and plain linears are torch's.

T rows, D width, E outputs of queries, keys and values, K inputs, N outputs; c, d, n a tensor rank's own columns of
queries, hidden states and inner rows; h heads of f features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import gelu, layer_norm, linear, relu, rms_norm, silu

from ppserve.core.architecture import Architecture, StageLayout
from ppserve.model.backend import (
    AttentionWeights,
    Head,
    Linear,
    MLPWeights,
    NormWeights,
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
    "gelu": gelu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": relu,
    "silu": silu,
    "tanh": torch.tanh,
}
"""The GPT-2 family's activations by Hugging Face's names."""


Attend = Callable[[int, torch.Tensor, float], torch.Tensor]
"""The attention of one step: its number in the stage, (T, E) rows and the factor on Q·K give (T, c).
It keeps the rows' keys and values, then attends to all so far."""


@dataclass(frozen=True, slots=True)
class AttendInputs(StepInputs):
    """Inputs of a cache that attends by a call of its own."""

    attend: Attend
    turns_Tf: torch.Tensor | None  # each row's cosines and sines (`rotary.Turns`)


def norm_of(weights: NormWeights) -> Operator:
    shape = weights.weight_D.shape
    if weights.is_rms:
        return partial(rms_norm, normalized_shape=shape, weight=weights.weight_D, eps=weights.epsilon)
    return partial(
        layer_norm, normalized_shape=shape, weight=weights.weight_D, bias=weights.bias_D, eps=weights.epsilon
    )


def _turn(x_Thf: torch.Tensor, turns_Tf: torch.Tensor) -> torch.Tensor:
    """Heads turned by their rows' positions, in float32."""
    cosines_T1f, sines_T1f = turns_Tf[:, None].chunk(2, dim=2)
    first_Thf, second_Thf = x_Thf.float().chunk(2, dim=2)
    turned = first_Thf * cosines_T1f - second_Thf * sines_T1f, second_Thf * cosines_T1f + first_Thf * sines_T1f
    return torch.cat(turned, dim=2).to(x_Thf.dtype)


def _heads_turned(qkv_TE: torch.Tensor, weights: AttentionWeights, turns_Tf: torch.Tensor) -> torch.Tensor:
    """Queries and keys, normed where the model asks for it, and turned."""
    own = weights.heads.width
    queries_TE, keys_TE, values_TE = torch.split(qkv_TE, [own, *[(qkv_TE.shape[1] - own) // 2] * 2], dim=1)
    heads_shape = len(qkv_TE), -1, turns_Tf.shape[1]
    norms = [norm_of(norm) for norm in weights.head_norms or ()] or [lambda x: x] * 2
    turned = [
        _turn(norm(each_TE.view(*heads_shape)), turns_Tf).flatten(1)
        for norm, each_TE in zip(norms, (queries_TE, keys_TE), strict=True)
    ]
    return torch.cat([*turned, values_TE], dim=1)


class TorchBackend:
    """Weights, arithmetic and hidden states in one dtype; keys and values may differ."""

    more_rows: tuple[int, ...] = ()
    more_head_rows: tuple[int, ...] = ()

    def __init__(self, device: torch.device, dtype: str, kv_dtype: str | None = None) -> None:
        one: torch.dtype = getattr(torch, dtype)
        self.device = device
        self.precision = Precision(one, getattr(torch, kv_dtype or dtype), one, one)

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.precision.weights).to(self.device)

    def linear(self, weight_NK: Matrix, bias_N: torch.Tensor | None, is_probe: bool = False) -> Linear:
        return PlainLinear(self.stored(weight_NK[:]), bias_N)

    def lm_head(self, weight_NK: Matrix) -> Linear:
        return self.linear(weight_NK, None)

    def attention(self, weights: AttentionWeights) -> Sublayer:
        norm, own = norm_of(weights.norm), weights.columns.own

        def residual(x_TD: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
            assert isinstance(inputs, AttendInputs)
            gather, qkv_TE = inputs.gather, weights.qkv(norm(x_TD))
            if inputs.turns_Tf is not None:
                qkv_TE = _heads_turned(qkv_TE, weights, inputs.turns_Tf)
            own_Tc = inputs.attend(weights.number, qkv_TE, weights.scale)
            own_Td = x_TD[:, own] + weights.proj(gather.all(own_Tc, weights.heads))
            return gather.all(own_Td, weights.columns)

        return residual

    def mlp(self, weights: MLPWeights) -> Sublayer:
        norm = norm_of(weights.norm)
        activate = ACTIVATIONS[weights.activation]
        own = weights.columns.own

        def residual(x_TD: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
            gather = inputs.gather
            inner_TN = weights.expand(norm(x_TD))
            if weights.is_gated:
                gate_Tn, up_Tn = inner_TN.chunk(2, dim=1)
                own_Tn = activate(gate_Tn) * up_Tn
            else:
                own_Tn = activate(inner_TN)
            own_Td = x_TD[:, own] + weights.contract(gather.all(own_Tn, weights.inner))
            return gather.all(own_Td, weights.columns)

        return residual

    def head(self, norm: NormWeights, linear: Linear) -> Head:
        normed = norm_of(norm)
        return lambda hidden_RD: linear(normed(hidden_RD)).float()

    def block_bytes(self, arch: Architecture, layout: StageLayout, block_size: int) -> int:
        return block_size * layout.kv_bytes_per_token(arch, self.precision.kv.itemsize)


class PlainLinear:
    """Weights as they are, in torch's product or another."""

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, product: Product = linear) -> None:
        self._weight_NK = weight_NK
        self._bias_N = bias_N
        self._product = product
        self.num_outputs, self.num_inputs = weight_NK.shape
        self.num_bytes = weight_NK.nbytes

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        return self._product(x_TK, self._weight_NK, self._bias_N)
