"""torch's own operators on the CPU: the oracle for the kernels.

T rows, D width, E = 3D, H heads, d head size, B blocks, p positions of a block, P positions of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from ppserve.core.architecture import Architecture, Cut, Rotary, StageLayout
from ppserve.model import sampling
from ppserve.model.backend import HostTiming, Reading, StageModel, Timing
from ppserve.model.inputs import Gather, KVCache, StepInputs, StepRows
from ppserve.model.rotary import Turns
from ppserve.model.stock import AttendInputs, TorchBackend


class StockBackend(TorchBackend):
    """All of it torch's, in host memory."""

    read_rows_at_once = 64

    def __init__(self, dtype: str, kv_dtype: str | None = None) -> None:
        super().__init__(torch.device("cpu"), dtype, kv_dtype)

    def make_cache(
        self, arch: Architecture, layout: StageLayout, num_blocks: int, block_size: int, *, populate: bool = False
    ) -> StockCache:
        heads = layout.kv_heads(arch).width
        shape = (len(layout.attentions), num_blocks, block_size, heads, arch.head_size)
        keys_LBpHd, values_LBpHd = (torch.zeros(shape, dtype=self.precision.kv, device=self.device) for _ in "kv")
        return StockCache(keys_LBpHd, values_LBpHd, rotary=arch.rotary)

    def recorded(self, model: StageModel, cache: KVCache) -> StageModel:
        return model

    def read_logits(self, inputs: StepInputs, pieces_Rv: Iterator[torch.Tensor], vocabulary: Cut) -> Reading:
        results = sampling.read_logits(inputs.rows.plan, pieces_Rv, inputs.gather, vocabulary)
        return lambda: results

    def timing(self) -> Timing:
        return HostTiming()

    def describe(self) -> str:
        return f"torch for {torch.backends.cpu.get_cpu_capability()}"


class StockCache:
    """Keys and values of L layers, both as (L, B, p, H, d)."""

    def __init__(
        self,
        keys_LBpHd: torch.Tensor,
        values_LBpHd: torch.Tensor,
        keys_multiple: int = 512,
        least_rows: int = 4,
        rotary: Rotary | None = None,
    ) -> None:
        """keys_multiple, least_rows: the padding of `StockAttention`; 1 and 1 for none."""
        self._turns = None if rotary is None else Turns(rotary)
        self.keys_LBpHd, self.values_LBpHd = keys_LBpHd, values_LBpHd
        _, self.num_blocks, self.block_size, _, _ = keys_LBpHd.shape
        self._padding = keys_multiple, least_rows

    def inputs(self, rows: StepRows, gather: Gather) -> StepInputs:
        here, attend = torch.from_numpy, StockAttention(self, rows, *self._padding)
        turns_Tf = None if self._turns is None else here(self._turns.at(rows.positions_T))
        arrays = here(rows.token_ids_T), here(rows.positions_T), here(rows.read_rows)
        return AttendInputs(rows, *arrays, gather, attend, turns_Tf)

    def fill(self, value: float) -> None:
        self.keys_LBpHd.fill_(value)
        self.values_LBpHd.fill_(value)


class StockAttention:
    """One step. Each slice's blocks are gathered, then torch's scaled dot product.

    On CPUs that operator walks keys in blocks of 512, so keys are padded to a multiple of that; and it takes
    another path for fewer than four query rows. With both, it is batch-invariant there: a row's result does not
    depend on the other rows.
    """

    def __init__(self, cache: StockCache, rows: StepRows, keys_multiple: int, least_rows: int) -> None:
        self._cache = cache
        self._keys_multiple = keys_multiple
        self._least_rows = least_rows
        slots_T = torch.from_numpy(rows.slots_T)
        self._block_T, self._offset_T = slots_T // cache.block_size, slots_T % cache.block_size
        tables = torch.from_numpy(rows.tables)
        each = zip(rows.first_row_S, rows.num_rows_S, rows.start_S, rows.table_begin_S, strict=True)
        # Of every slice: its rows, the position of the first, and the blocks of all positions so far.
        self._slices = [
            (slice(first, first + count), start, tables[begin : begin - (-(start + count) // cache.block_size)])
            for first, count, start, begin in (map(int, of) for of in each)
        ]

    def __call__(self, layer: int, qkv_TE: torch.Tensor, scale: float) -> torch.Tensor:
        keys_BpHd, values_BpHd = self._cache.keys_LBpHd[layer], self._cache.values_LBpHd[layer]
        num_heads, head_size = keys_BpHd.shape[2:]
        each = qkv_TE.split([qkv_TE.shape[1] - 2 * num_heads * head_size, *[num_heads * head_size] * 2], dim=1)
        query_THd, key_THd, value_THd = (own_TE.unflatten(1, (-1, head_size)) for own_TE in each)
        keys_BpHd[self._block_T, self._offset_T] = key_THd.to(keys_BpHd.dtype)
        values_BpHd[self._block_T, self._offset_T] = value_THd.to(values_BpHd.dtype)
        mixed_THd = torch.empty_like(query_THd, memory_format=torch.contiguous_format)
        for rows, start, table in self._slices:
            query_tHd = query_THd[rows]
            key_HPd, value_HPd = (
                self._gather(numbers_BpHd[table], start + len(query_tHd)).to(query_tHd.dtype)
                for numbers_BpHd in (keys_BpHd, values_BpHd)
            )
            mixed_THd[rows] = self._attend(query_tHd, key_HPd, value_HPd, start, scale)
        return mixed_THd.flatten(1)

    def _gather(self, numbers_npHd: torch.Tensor, count: int) -> torch.Tensor:
        """The first `count` positions of a sequence's n blocks as (H, P, d), then zeros to a multiple."""
        in_order_HPd = numbers_npHd.flatten(0, 1)[:count].transpose(0, 1)
        return pad(in_order_HPd, (0, 0, 0, -count % self._keys_multiple)).contiguous()

    def _attend(
        self, query_tHd: torch.Tensor, key_HPd: torch.Tensor, value_HPd: torch.Tensor, start: int, scale: float
    ) -> torch.Tensor:
        count = query_tHd.shape[0]
        query_Htd = query_tHd.transpose(0, 1)
        if count < self._least_rows:
            query_Htd = pad(query_Htd, (0, 0, 0, self._least_rows - count))
        positions_t = start + torch.arange(query_Htd.shape[1], device=query_Htd.device)
        visible_tP = torch.arange(key_HPd.shape[1], device=query_Htd.device) <= positions_t[:, None]
        mixed_Htd = scaled_dot_product_attention(
            query_Htd[None], key_HPd[None], value_HPd[None], attn_mask=visible_tP, scale=scale, enable_gqa=True
        )[0]
        return mixed_Htd[:, :count].transpose(0, 1)
