"""Operators that torch does not have, or whose results for a row in torch depend on the other rows.

Here they are written with torch, for any device: they are the reference for the kernels in `triton_operators`.

T rows, D width, E outputs of queries, keys and values, H heads, d head size, B blocks, p positions of a block,
K inputs, N outputs, V vocabulary, R rows read out, n tiles: up to ROWS_PER_TILE consecutive rows of one slice
each, m rows of a tile, P positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import linear, pad

from ppserve.core.layers import AttentionSpec

ROWS_PER_TILE = 16
"""So many rows share the loads of keys and values. It is the size of a tensor core's smallest product."""


def _float32(*numbers: float) -> list[float]:
    return [float(np.float32(number)) for number in numbers]


# The float32 constants of `compiled.lanes.exp`, so that weights have the same bits.
EXP_LEAST, EXP_MOST, EXP_ROUND, EXP_LOG2_E = _float32(-87.3, 88.3, 1.5 * 2**23, 1.4426950408889634)
EXP_LN2_HIGH, EXP_LN2_LOW = _float32(-0.693359375, 2.12194440e-4)
EXP_POLYNOMIAL = _float32(1.98756915e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)


@dataclass(frozen=True, slots=True)
class Tiles:
    """The rows of a step for attention, on the device, int32."""

    tiles_n4: torch.Tensor
    """Each tile's first row, its number of rows, its first position, and where the slice's blocks begin in
    `tables`. A tile at position -1 is padding: it has no keys, and its rows become zeros."""
    tables: torch.Tensor
    max_keys: int
    """The most keys that a row can have in any step."""


class Operators:
    """The operators, each of one launch. A row of a result depends only on the same row of the arguments."""

    name = "torch's operators"

    def write(
        self, qkv_TE: torch.Tensor, keys_BpHd: torch.Tensor, values_BpHd: torch.Tensor, slots_T: torch.Tensor
    ) -> None:
        """Write the rows' keys and values to the cache. slots_T: int32, block * block size + offset; -1: write
        nothing."""
        _, keys_THd, values_THd = _heads(qkv_TE, keys_BpHd)
        is_kept_T = slots_T >= 0
        for new_THd, numbers_BpHd in ((keys_THd, keys_BpHd), (values_THd, values_BpHd)):
            numbers_BpHd.flatten(0, 1)[slots_T[is_kept_T].long()] = new_THd[is_kept_T].to(numbers_BpHd.dtype)

    def attend(
        self,
        qkv_TE: torch.Tensor,
        keys_BpHd: torch.Tensor,
        values_BpHd: torch.Tensor,
        at: Tiles,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """Return each row's weighted sum of the values that it sees, (T, c). A row sees the positions up to its
        own, and only those in its window."""
        queries_THd, _, _ = _heads(qkv_TE, keys_BpHd)
        num_rows = len(queries_THd)
        block_size = keys_BpHd.shape[1]
        device = qkv_TE.device
        queries_per_kv_head = queries_THd.shape[1] // keys_BpHd.shape[2]
        first_n1, count_n1, start_n1, begin_n1 = at.tiles_n4.long().T[:, :, None].unbind(0)
        row_m, position_P = (torch.arange(count, device=device) for count in (ROWS_PER_TILE, at.max_keys))
        is_row_nm = row_m < count_n1
        rows_nm = torch.where(is_row_nm, first_n1 + row_m, num_rows)
        last_nm = torch.where(is_row_nm & (start_n1 >= 0), start_n1 + row_m, -1)
        sees_nmP = position_P <= last_nm[:, :, None]
        if spec.window is not None:
            sees_nmP &= position_P > last_nm[:, :, None] - spec.window
        is_seen_nP = sees_nmP.any(1)
        entries_nP = torch.where(is_seen_nP, begin_n1 + position_P // block_size, 0)
        slots_nP = at.tables.long()[entries_nP] * block_size + position_P % block_size
        slots_nP = torch.where(is_seen_nP, slots_nP, 0)
        # Another sequence's values may be NaN, and NaN times zero is NaN.
        kept_nPHd = (
            torch.where(is_seen_nP[:, :, None, None], of_BpHd.flatten(0, 1)[slots_nP].float(), 0.0)
            for of_BpHd in (keys_BpHd, values_BpHd)
        )
        keys_nPHd, values_nPHd = (of_nPHd.repeat_interleave(queries_per_kv_head, dim=2) for of_nPHd in kept_nPHd)
        queries_nHmd = queries_THd[rows_nm.clamp(max=num_rows - 1)].transpose(1, 2).float()
        scores_nHmP = queries_nHmd @ keys_nPHd.permute(0, 2, 3, 1) * spec.scale
        weights_nHmP = torch.where(sees_nmP[:, None], scores_nHmP, -torch.inf).softmax(3)
        mixed_nmHd = (weights_nHmP @ values_nPHd.transpose(1, 2)).transpose(1, 2).to(qkv_TE.dtype)
        # One row more takes what belongs to no row.
        mixed_THd = torch.zeros(num_rows + 1, *queries_THd.shape[1:], dtype=qkv_TE.dtype, device=device)
        mixed_THd[rows_nm] = torch.where((last_nm >= 0)[:, :, None, None], mixed_nmHd, 0.0)
        return mixed_THd[:num_rows].flatten(1)

    def product(self, x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
        """Return x Wᵀ + b."""
        num_rows = len(x_TK)
        pieces_nmK = pad(x_TK, (0, 0, 0, -num_rows % ROWS_PER_TILE)).view(-1, ROWS_PER_TILE, x_TK.shape[1])
        return torch.cat([linear(piece_mK, weight_NK, bias_N) for piece_mK in pieces_nmK.unbind(0)])[:num_rows]

    def weights(self, scores_RV: torch.Tensor, most_R: torch.Tensor, temperature_R: torch.Tensor) -> torch.Tensor:
        """Return float32 exp((score - most) / temperature), with the bits of `compiled.lanes.exp`."""
        x_RV = (scores_RV - most_R[:, None]) / temperature_R[:, None]
        inside_RV = x_RV.clamp(EXP_LEAST, EXP_MOST)
        shifted_RV = _multiply_add(inside_RV, EXP_LOG2_E, EXP_ROUND)
        n_RV = shifted_RV - EXP_ROUND
        r_RV = _multiply_add(n_RV, EXP_LN2_LOW, _multiply_add(n_RV, EXP_LN2_HIGH, inside_RV))
        p_RV = torch.full_like(r_RV, EXP_POLYNOMIAL[0])
        for coefficient in EXP_POLYNOMIAL[1:]:
            p_RV = _multiply_add(p_RV, r_RV, coefficient)
        p_RV = _multiply_add(p_RV, r_RV * r_RV, r_RV) + 1.0
        power_RV = ((shifted_RV.view(torch.int32) + 127) << 23).view(torch.float32)
        return torch.where(x_RV < EXP_LEAST, 0.0, p_RV * power_RV)

    def running_sums(self, weights_RV: torch.Tensor) -> torch.Tensor:
        """Return float64 running sums. On a GPU, torch's own depend on the number of rows, and differ from run to
        run."""
        return weights_RV.cumsum(1, dtype=torch.float64)


def _heads(qkv_TE: torch.Tensor, keys_BpHd: torch.Tensor) -> list[torch.Tensor]:
    """Return the rows' queries, keys and values, each (T, its heads, d)."""
    num_heads, size = keys_BpHd.shape[2:]
    width = num_heads * size
    each_TE = torch.split(qkv_TE, [qkv_TE.shape[1] - 2 * width, width, width], dim=1)
    return [own_TE.view(len(own_TE), -1, size) for own_TE in each_TE]


def _multiply_add(a: torch.Tensor, b: torch.Tensor | float, c: torch.Tensor | float) -> torch.Tensor:
    """Return a * b + c. It is nearly always rounded only once, because the product is exact in float64."""
    b, c = (number.double() if isinstance(number, torch.Tensor) else number for number in (b, c))
    return (a.double() * b + c).float()
