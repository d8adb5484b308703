"""Attention over blocks of keys and values, in which a row's result depends on that row alone.

A row walks its sequence's keys in groups of 16, in order, with a running maximum and sum (the online
softmax of Milakov and Gimelshein, 2018). Which rows share the call, how the prompt was chunked and how
many threads there are changes which rows are visited when, never what is added to what: prefill, chunk
and decode agree bit for bit. Rows of a tile share the loads of keys and values, nothing else.

T rows, D width, E = 3D, H heads, d head size, p positions of a block.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ppserve.model.cpu.attention_kernel import attend, write_rows
from ppserve.model.cpu.kv_cache import KVCache
from ppserve.model.cpu.threads import Threads
from ppserve.model.inputs import StepInputs

_KEYS_READ_PER_THREAD = 16_384
"""Below this much work (rows times keys times heads) per thread, waking one costs more than it saves."""


class Attention(Protocol):
    """Attention of one layer: writes the rows' keys and values to the cache, then attends."""

    def __call__(
        self, qkv_TE: torch.Tensor, cache: KVCache, layer: int, inputs: StepInputs, scale: float
    ) -> torch.Tensor:
        """(T, D). layer: the stage's own index. scale: the factor on Q·K."""
        ...


def _elements(tensor: torch.Tensor) -> NDArray[np.generic]:
    """A flat view of a tensor for kernels; bfloat16 appears as uint16."""
    flat = tensor.view(-1)
    return flat.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else flat.numpy()


class BlockAttention:
    """The CPU kernel: rows in float32, keys and values in float32 or bfloat16."""

    def __init__(self, num_heads: int, threads: Threads) -> None:
        self._num_heads = num_heads
        self._threads = threads

    def __call__(
        self, qkv_TE: torch.Tensor, cache: KVCache, layer: int, inputs: StepInputs, scale: float
    ) -> torch.Tensor:
        num_rows, width = qkv_TE.shape[0], qkv_TE.shape[1] // 3
        mixed_TD = torch.empty(num_rows, width)
        keys, values = _elements(cache.keys_LBHdp[layer]), _elements(cache.values_LBHpd[layer])
        shape = (self._num_heads, width // self._num_heads, cache.block_size)
        qkv = qkv_TE.numpy()
        write_rows(qkv, keys, values, inputs.slots_T, shape)
        work = (qkv, keys, values, inputs.tables, inputs.tiles, mixed_TD.numpy(), shape, np.float32(scale))
        self._threads.run(attend, work, self._bounds(inputs))
        return mixed_TD

    def _bounds(self, inputs: StepInputs) -> list[int]:
        """Tiles for each thread, about equally many keys each; one part when there is little to do."""
        num_tiles = len(inputs.tiles)
        if self._threads.count == 1:
            return [0, num_tiles]
        keys_read = np.cumsum(inputs.tiles[:, 1] * (inputs.tiles[:, 2] + inputs.tiles[:, 1]))
        total = int(keys_read[-1])
        parts = min(self._threads.count, max(1, total * self._num_heads // _KEYS_READ_PER_THREAD), num_tiles)
        inner = {int(np.searchsorted(keys_read, total * part / parts)) for part in range(1, parts)}
        return [0, *sorted(inner - {0, num_tiles}), num_tiles]


class TorchAttention:
    """Stock operators: the way on CUDA, and elsewhere the oracle for the kernel.

    The CPU operator walks keys in blocks of 512, so keys are padded to a multiple of that; and it takes
    another path for fewer than four query rows. With both, rows do not feel each other there either.
    """

    def __init__(self, num_heads: int, keys_multiple: int = 512, least_rows: int = 4) -> None:
        self._num_heads = num_heads
        self._keys_multiple = keys_multiple
        self._least_rows = least_rows

    def __call__(
        self, qkv_TE: torch.Tensor, cache: KVCache, layer: int, inputs: StepInputs, scale: float
    ) -> torch.Tensor:
        num_rows, width = qkv_TE.shape[0], qkv_TE.shape[1] // 3
        query_THd, key_THd, value_THd = qkv_TE.view(num_rows, 3, self._num_heads, -1).unbind(1)
        keys_BHdp, values_BHpd = cache.keys_LBHdp[layer], cache.values_LBHpd[layer]
        slots_T = torch.from_numpy(inputs.slots_T).to(qkv_TE.device)
        block_T, offset_T = slots_T // cache.block_size, slots_T % cache.block_size
        keys_BHdp[block_T, :, :, offset_T] = key_THd.to(keys_BHdp.dtype)
        values_BHpd[block_T, :, offset_T, : value_THd.shape[2]] = value_THd.to(values_BHpd.dtype)
        mixed_TD = torch.empty(num_rows, width, dtype=qkv_TE.dtype, device=qkv_TE.device)
        each = zip(inputs.first_row_S, inputs.num_rows_S, inputs.start_S, inputs.table_begin_S, strict=True)
        for first_row, count, start, table_begin in each:
            num_blocks = -(-(start + count) // cache.block_size)
            table = torch.from_numpy(inputs.tables[table_begin : table_begin + num_blocks]).to(qkv_TE.device)
            rows = slice(first_row, first_row + count)
            key_HPd = self._gather(keys_BHdp[table, :, :, : cache.block_size].transpose(2, 3), start + count)
            value_HPd = self._gather(values_BHpd[table, :, :, : query_THd.shape[2]], start + count)
            mixed_TD[rows] = self._attend(query_THd[rows], key_HPd, value_HPd, int(start), scale)
        return mixed_TD

    def _gather(self, blocks_nHpd: torch.Tensor, num_keys: int) -> torch.Tensor:
        """A sequence's blocks as (H, P, d): its own keys, then zeros up to a multiple of `keys_multiple`."""
        in_order_HPd = blocks_nHpd.transpose(0, 1).flatten(1, 2)[:, :num_keys]
        return torch.nn.functional.pad(in_order_HPd, (0, 0, 0, -num_keys % self._keys_multiple))

    def _attend(
        self, query_tHd: torch.Tensor, key_HPd: torch.Tensor, value_HPd: torch.Tensor, start: int, scale: float
    ) -> torch.Tensor:
        count = query_tHd.shape[0]
        query_Htd = query_tHd.transpose(0, 1)
        if count < self._least_rows:
            query_Htd = torch.nn.functional.pad(query_Htd, (0, 0, 0, self._least_rows - count))
        positions_t = start + torch.arange(query_Htd.shape[1], device=query_Htd.device)
        visible_tP = torch.arange(key_HPd.shape[1], device=query_Htd.device) <= positions_t[:, None]
        like = query_Htd.dtype
        mixed_Htd = torch.nn.functional.scaled_dot_product_attention(
            query_Htd[None], key_HPd.to(like)[None], value_HPd.to(like)[None], attn_mask=visible_tP, scale=scale
        )[0]
        return mixed_Htd[:, :count].transpose(0, 1).reshape(count, -1)
