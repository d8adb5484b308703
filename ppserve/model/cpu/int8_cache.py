"""Checks, when a stage is loaded, that int8 is fine enough for its layers' keys and values.

The keys of one position and head share a scale, and so do the values. The largest feature decides it. Where a bias
(as that of Qwen 2's keys) or a norm makes a few features much larger, few steps are left for the others, and their
values become noise. So the model's own weights make keys and values of random hidden states, and the error of
rounding these is measured.

T rows, H heads of keys and values, g queries that read a head, d features.
"""

from __future__ import annotations

import torch

from ppserve.errors import ConfigError
from ppserve.model.backend import AttentionWeights, NormWeights
from ppserve.model.cpu.linear import PackedLinear
from ppserve.model.stock import norm_of

MAX_ERROR = 0.1
"""The greatest root mean square error that is allowed: of a head's scores (a weight of attention is then off by a
tenth), and of its values, relative to how much the layer's values differ between positions. The greatest of
SmolLM2 are 0.04 and 0.01."""

_NUM_ROWS = 64


def check_int8_cache(weights: AttentionWeights[PackedLinear], norm: NormWeights | None) -> None:
    """Raise ConfigError if int8 is too coarse for an attention's keys and values. Queries and keys are not rotated
    by positions here, because that changes little. norm: the one before the attention; None: there is none."""
    x_TD = torch.randn(_NUM_ROWS, weights.qkv.num_inputs, generator=torch.Generator().manual_seed(0))
    outputs_TN = weights.qkv((x_TD if norm is None else _normed(norm, x_TD)).contiguous())
    own = weights.heads.width
    parts = torch.split(outputs_TN, [own, *[(outputs_TN.shape[1] - own) // 2] * 2], dim=1)
    queries_THd, keys_THd, values_THd = (part.reshape(_NUM_ROWS, -1, weights.spec.head_size) for part in parts)
    if weights.head_norms is not None:
        of_queries, of_keys = weights.head_norms
        queries_THd, keys_THd = _normed(of_queries, queries_THd), _normed(of_keys, keys_THd)
    queries_THgd = queries_THd.reshape(_NUM_ROWS, keys_THd.shape[1], -1, weights.spec.head_size)
    scores_TTHg = weights.spec.scale * torch.einsum("tHgd,sHd->stHg", queries_THgd, _rounding(keys_THd))
    # An error that is the same at all positions changes no weight of attention.
    scores = _deviation(scores_TTHg, dim=(0, 1, 3))
    values = _deviation(_rounding(values_THd), dim=(0, 2)) / _deviation(values_THd, dim=(0, 1, 2))
    for name, error in (("scores", scores), ("values", values)):
        if (worst := float(error.max())) > MAX_ERROR:
            problem = (
                f"int8 is too coarse for this model: {name} of this stage's attention {weights.number} would be"
                f" off by {worst:.2g}, and {MAX_ERROR} is allowed; use bfloat16 or float32, or leave it out"
            )
            raise ConfigError("--kv-dtype", problem)


def _normed(weights: NormWeights, x: torch.Tensor) -> torch.Tensor:
    return norm_of(weights)(x.to(weights.weight_D.dtype)).float()


def _rounding(x_THd: torch.Tensor) -> torch.Tensor:
    """Return the error that int8 adds to each number."""
    step_TH1 = x_THd.abs().amax(dim=2, keepdim=True).clamp(min=1e-30) / 127
    return (x_THd / step_TH1).round() * step_TH1 - x_THd


def _deviation(x: torch.Tensor, dim: tuple[int, ...]) -> torch.Tensor:
    """Return the root mean square by which numbers differ between positions, which are the first dimension."""
    return (x - x.mean(dim=0)).square().mean(dim=dim).sqrt()
