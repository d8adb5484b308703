"""What backends share that use torch's norms, activations and plain linear layers.

T rows, D width, E outputs of queries, keys and values, K inputs, N outputs; c, d, n a tensor rank's own columns of
queries, hidden states and inner rows; h heads of f features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import gelu, layer_norm, linear, relu, rms_norm, silu

from ppserve.core.architecture import Architecture, StageLayout
from ppserve.core.layers import AttentionSpec
from ppserve.model.backend import (
    AttentionWeights,
    Head,
    Linear,
    MLPWeights,
    NormWeights,
    Operator,
    Precision,
    ResidualWeights,
    Sublayer,
)
from ppserve.model.checkpoint import Matrix
from ppserve.model.inputs import StepInputs

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""It computes x Wᵀ + b from x, W and b."""

ACTIVATIONS: dict[str, Operator] = {
    "gelu_new": partial(gelu, approximate="tanh"),
    "gelu": gelu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": relu,
    "silu": silu,
    "tanh": torch.tanh,
}
"""The activations of GPT-2 and the Llamas, by Hugging Face's names."""


Attend = Callable[[int, torch.Tensor, AttentionSpec], torch.Tensor]
"""It computes an attention for one step. It takes the attention's number in the stage, rows (T, E), and the
specification; it returns (T, c). It writes the rows' keys and values to the cache, then attends to all positions
that each row sees."""


@dataclass(frozen=True, slots=True)
class AttendInputs(StepInputs):
    """The inputs of a step for backends that compute an attention by one call."""

    attend: Attend
    rotations_RTf: torch.Tensor | None
    """Each row's cosines and sines (`rotary.RotaryTable`), for each of the model's rotary positions."""


def norm_of(weights: NormWeights) -> Operator:
    shape = weights.weight_D.shape
    if weights.is_rms:
        return partial(rms_norm, normalized_shape=shape, weight=weights.weight_D, eps=weights.epsilon)
    return partial(
        layer_norm, normalized_shape=shape, weight=weights.weight_D, bias=weights.bias_D, eps=weights.epsilon
    )


def _rotated(x_Thf: torch.Tensor, rotation_Tf: torch.Tensor) -> torch.Tensor:
    """Rotate heads by their rows' positions, in float32."""
    cosines_T1f, sines_T1f = rotation_Tf[:, None].chunk(2, dim=2)
    first_Thf, second_Thf = x_Thf.float().chunk(2, dim=2)
    rotated = first_Thf * cosines_T1f - second_Thf * sines_T1f, second_Thf * cosines_T1f + first_Thf * sines_T1f
    return torch.cat(rotated, dim=2).to(x_Thf.dtype)


def _with_positions(
    qkv_TE: torch.Tensor, weights: AttentionWeights[Linear], rotations_RTf: torch.Tensor | None
) -> torch.Tensor:
    """Norm and rotate queries and keys, each if the model asks for it. Return them with the values."""
    own = weights.heads.width
    queries_TE, keys_TE, values_TE = torch.split(qkv_TE, [own, *[(qkv_TE.shape[1] - own) // 2] * 2], dim=1)
    heads_shape = len(qkv_TE), -1, weights.spec.head_size
    parts = []
    for number, each_TE in enumerate((queries_TE, keys_TE)):
        heads_Thf = each_TE.view(*heads_shape)
        if weights.head_norms is not None:
            heads_Thf = norm_of(weights.head_norms[number])(heads_Thf)
        if weights.rotary is not None and rotations_RTf is not None:
            heads_Thf = _rotated(heads_Thf, rotations_RTf[weights.rotary])
        parts.append(heads_Thf.flatten(1))
    return torch.cat([*parts, values_TE], dim=1)


class TorchBackend:
    """What torch computes of a model, in one dtype. Keys and values may have another dtype."""

    more_rows: tuple[int, ...] = ()
    more_head_rows: tuple[int, ...] = ()

    def __init__(self, device: torch.device, dtype: str, kv_dtype: str | None = None) -> None:
        one: torch.dtype = getattr(torch, dtype)
        self.device = device
        self.precision = Precision(one, getattr(torch, kv_dtype or dtype), one, one)

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.precision.weights).to(self.device)

    def linear(self, weight_NK: Matrix, bias_N: torch.Tensor | None, for_selftest: bool = False) -> Linear:
        return PlainLinear(self.stored(weight_NK[:]), bias_N)

    def lm_head(self, weight_NK: Matrix) -> Linear:
        return self.linear(weight_NK, None)

    def check(self, weights: ResidualWeights[Linear]) -> None:
        """Accept all weights: floating-point numbers are fine enough for any."""

    def norm(self, weights: NormWeights) -> Operator:
        return norm_of(weights)

    def fused(self, lines: Sequence[ResidualWeights[Linear]]) -> Sublayer[AttendInputs] | None:
        return None

    def attention(self, weights: AttentionWeights[Linear]) -> Sublayer[AttendInputs]:
        def compute(x_TD: torch.Tensor, inputs: AttendInputs) -> torch.Tensor:
            gather, qkv_TE = inputs.gather, weights.qkv(x_TD)
            if weights.rotary is not None or weights.head_norms is not None:
                qkv_TE = _with_positions(qkv_TE, weights, inputs.rotations_RTf)
            own_Tc = inputs.attend(weights.number, qkv_TE, weights.spec)
            return gather.all(weights.proj(gather.all(own_Tc, weights.heads)), weights.columns)

        return compute

    def mlp(self, weights: MLPWeights[Linear]) -> Sublayer[StepInputs]:
        activate = ACTIVATIONS[weights.spec.activation]

        def compute(x_TD: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
            gather = inputs.gather
            inner_TN = weights.expand(x_TD)
            if weights.spec.is_gated:
                gate_Tn, up_Tn = inner_TN.chunk(2, dim=1)
                own_Tn = activate(gate_Tn) * up_Tn
            else:
                own_Tn = activate(inner_TN)
            return gather.all(weights.contract(gather.all(own_Tn, weights.inner)), weights.columns)

        return compute

    def head(self, norm: NormWeights, linear: Linear) -> Head:
        normed = norm_of(norm)
        return lambda hidden_RD: linear(normed(hidden_RD)).float()

    def block_bytes(self, arch: Architecture, layout: StageLayout, block_size: int) -> int:
        return block_size * layout.kv_bytes_per_token(arch, self.precision.kv.itemsize)


class PlainLinear:
    """A linear layer whose weights are not repacked. product: torch's, or another."""

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, product: Product = linear) -> None:
        self._weight_NK = weight_NK
        self._bias_N = bias_N
        self._product = product
        self.num_outputs, self.num_inputs = weight_NK.shape
        self.num_bytes = weight_NK.nbytes

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        return self._product(x_TK, self._weight_NK, self._bias_N)
