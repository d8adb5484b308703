"""Attention over blocks of keys and values, in which a row's result depends on that row alone.

For each row and head the kernel computes the scores of all keys, in order, then their maximum, their exponentials
and the sum of these, then the weighted sum of the values, in order. Which rows share the call, how the prompt was
chunked and how many threads there are decides which rows are computed when, never what is added to what: prefill,
chunk and decode agree bit for bit. Rows of a tile share the loads of keys and values, nothing else.

T rows, D width, E = 3D, L layers, B blocks, H heads, d head size, p positions of a block.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ppserve.model.backend import Ints, StepRows
from ppserve.model.cpu.attention_kernel import attend, write_rows
from ppserve.model.cpu.threads import Threads

ROWS_PER_TILE = 4

_KEYS_READ_PER_THREAD = 16_384
"""Below this much work (rows times keys times heads) per thread, waking one costs more than it saves."""


class BlockAttention:
    """One step: rows in float32, keys (L, B, H, d, p) and values (L, B, H, p, d) in float32 or bfloat16."""

    def __init__(
        self, keys_LBHdp: torch.Tensor, values_LBHpd: torch.Tensor, rows: StepRows, threads: Threads
    ) -> None:
        self._keys_LBHdp, self._values_LBHpd = keys_LBHdp, values_LBHpd
        self._num_heads, self._head_size = keys_LBHdp.shape[2:4]
        self._block_size = values_LBHpd.shape[3]
        self._slots_T = rows.slots_T
        self._tables = rows.tables
        self._tiles = tiles_of(rows)
        self._threads = threads
        self._bounds = self._even_bounds()

    def __call__(self, layer: int, qkv_TE: torch.Tensor, scale: float) -> torch.Tensor:
        shape = (self._num_heads, self._head_size, self._block_size)
        mixed_TD = torch.empty(qkv_TE.shape[0], self._num_heads * self._head_size)
        keys, values = _elements(self._keys_LBHdp[layer]), _elements(self._values_LBHpd[layer])
        qkv = qkv_TE.numpy()
        write_rows(qkv, keys, values, self._slots_T, shape)
        work = (qkv, keys, values, self._tables, self._tiles, mixed_TD.numpy(), shape, np.float32(scale))
        self._threads.run(attend, work, self._bounds)
        return mixed_TD

    def _even_bounds(self) -> list[int]:
        """Tiles for each thread, about equally many keys each; one part when there is little to do."""
        tiles, count = self._tiles, self._threads.count
        num_tiles = len(tiles)
        if count == 1:
            return [0, num_tiles]
        keys_read = np.cumsum(tiles[:, 1] * (tiles[:, 2] + tiles[:, 1]))
        total = int(keys_read[-1])
        parts = min(count, max(1, total * self._num_heads // _KEYS_READ_PER_THREAD), num_tiles)
        inner = {int(np.searchsorted(keys_read, total * part / parts)) for part in range(1, parts)}
        return [0, *sorted(inner - {0, num_tiles}), num_tiles]


def tiles_of(rows: StepRows) -> Ints:
    """Every slice's rows in groups of up to ROWS_PER_TILE: (row, number of rows, position of the first, where its
    table begins)."""
    tiles_per_slice = -(-rows.num_rows_S // ROWS_PER_TILE)
    slice_of = np.repeat(np.arange(len(rows.num_rows_S)), tiles_per_slice)
    first_tile_S = np.cumsum(tiles_per_slice) - tiles_per_slice
    offset = (np.arange(len(slice_of)) - first_tile_S[slice_of]) * ROWS_PER_TILE
    tiles = np.empty((len(slice_of), 4), np.int64)
    tiles[:, 0] = rows.first_row_S[slice_of] + offset
    tiles[:, 1] = np.minimum(rows.num_rows_S[slice_of] - offset, ROWS_PER_TILE)
    tiles[:, 2] = rows.start_S[slice_of] + offset
    tiles[:, 3] = rows.table_begin_S[slice_of]
    return tiles


def _elements(tensor: torch.Tensor) -> NDArray[np.generic]:
    """A flat view of a tensor for kernels; bfloat16 appears as uint16."""
    flat = tensor.view(-1)
    return flat.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else flat.numpy()
