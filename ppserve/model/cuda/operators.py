"""The operators that torch does not have, or not for every row alone: by Triton on GPUs, by torch as their
reference.

T rows, D width, E = 3D, H heads, d head size, B blocks, p positions of a block, K inputs, N outputs, V vocabulary,
R rows read out, n tiles: up to ROWS_PER_TILE consecutive rows of one slice each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

ROWS_PER_TILE = 16
"""Rows that share loads of keys and values: what a tensor core's smallest product takes."""

KEYS_PER_TILE = 64
"""Keys that are taken at a time, from position 0 on, whatever the block size; of wide heads, fewer."""


def _float32(number: float) -> float:
    return float(np.float32(number))


# e**x as `compiled.lanes.exp` computes it, so that weights have the same bits: see there. All are float32 numbers.
EXP_LEAST, EXP_MOST = _float32(-87.3), _float32(88.3)
EXP_ROUND, EXP_LOG2_E = 1.5 * 2**23, _float32(1.4426950408889634)
EXP_LN2_HIGH, EXP_LN2_LOW = _float32(-0.693359375), _float32(2.12194440e-4)
EXP_C6, EXP_C5, EXP_C4 = _float32(1.9875691500e-4), _float32(1.3981999507e-3), _float32(8.3334519073e-3)
EXP_C3, EXP_C2, EXP_C1 = _float32(4.1665795894e-2), _float32(1.6666665459e-1), 0.5


@dataclass(frozen=True, slots=True)
class Tiles:
    """The rows of a step for attention, on the device, int32.

    tiles_n4: of each tile its first row, its number of rows, the position of the first, and where the slice's
    blocks begin in `tables`. A tile at position -1 pads a step: it has no keys, and its rows become zeros.
    max_keys: no row has more (on the host).
    """

    tiles_n4: torch.Tensor
    tables: torch.Tensor
    max_keys: int


class Operators(Protocol):
    """One launch each. A result's row depends on that row of the arguments alone."""

    name: str

    def write(
        self, qkv_TE: torch.Tensor, keys_BpHd: torch.Tensor, values_BpHd: torch.Tensor, slots_T: torch.Tensor
    ) -> None:
        """Keeps the rows' keys and values. slots_T: block * block size + offset, int32; -1 for none."""

    def attend(
        self, qkv_TE: torch.Tensor, keys_BpHd: torch.Tensor, values_BpHd: torch.Tensor, at: Tiles, scale: float
    ) -> torch.Tensor:
        """(T, D): each row's mix of the values at its position and before."""

    def product(self, x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
        """x Wᵀ + b."""

    def quick_gelu(self, x_TN: torch.Tensor) -> torch.Tensor:
        """x sigmoid(1.702 x), computed in float32. Of torch's operators it would take three."""

    def weights(self, scores_RV: torch.Tensor, most_R: torch.Tensor, temperature_R: torch.Tensor) -> torch.Tensor:
        """exp((score - most) / temperature) in float32, as `compiled.lanes.exp` computes it. All float32."""

    def running_sums(self, weights_RV: torch.Tensor) -> torch.Tensor:
        """Of float32 weights, in float64. torch's own sums of a row take an order that depends on how many rows
        there are, and of a lone row on chance."""
