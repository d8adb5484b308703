"""Keys and values in a device's memory, and the inputs of a step on the device.

Steps with one row per slice are recorded for some numbers of rows, called buckets. The arrays of other such steps
are padded to the next bucket (`step_arrays`).

L layers whose attention is on this stage, B blocks, p positions of a block, H heads of keys and values, d head
size, T rows, E outputs of queries, keys and values, S slices, n tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ppserve.core.architecture import Architecture, StageLayout
from ppserve.core.layers import AttentionSpec
from ppserve.core.plan import StepPlan
from ppserve.model.cuda.device import Staging, packed_bytes
from ppserve.model.cuda.draws import Draws
from ppserve.model.cuda.operators import ROWS_PER_TILE, Operators, Tiles
from ppserve.model.inputs import ALONE, Gather, Ints, StepRows
from ppserve.model.rotary import RotaryTable, rotations_of
from ppserve.model.sampling import ReadRow, rows_read
from ppserve.model.stock import AttendInputs

_NO_PLAN = StepPlan(0, 0, 0, ())
_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class DeviceInputs(AttendInputs):
    """A step's inputs on the device."""

    arrays: dict[str, torch.Tensor]
    draws: Draws
    """What the step draws, on the host."""
    bucket: int | None = None
    """The rows of the recorded step that computes this one; None: the step is not computed by a recorded one."""


class DeviceCache:
    """Keys and values in a device's memory: a `KVCache`. For each bucket it has a buffer, from which the recorded
    step reads its arrays."""

    def __init__(
        self,
        arch: Architecture,
        layout: StageLayout,
        blocks: tuple[int, int],
        dtype: torch.dtype,
        operators: Operators,
        staging: Staging,
    ) -> None:
        """blocks: their number, and the positions of one."""
        self.num_blocks, self.block_size = blocks
        self.device = staging.device
        self.operators = operators
        self._staging = staging
        self._arch, self._layout = arch, layout
        self._rotary_tables = tuple(map(RotaryTable, arch.rotaries))
        self._buffers: dict[int, torch.Tensor] = {}
        shape = (len(layout.attentions), *blocks, layout.kv_heads(arch).width, arch.head_size)
        self.keys_LBpHd = torch.zeros(shape, dtype=dtype, device=self.device)
        self.values_LBpHd = torch.zeros(shape, dtype=dtype, device=self.device)

    def use_buckets(self, sizes: tuple[int, ...]) -> dict[int, DeviceInputs]:
        """Begin to pad steps with one row per slice to these sizes, which ascend. Return for each size the inputs
        of a step of padding."""
        blocks_per_row = -(-self._arch.max_positions // self.block_size)
        empty_steps = {size: _empty_step(size * blocks_per_row) for size in sizes}
        for size, rows in empty_steps.items():
            num_bytes = packed_bytes(self._arrays(rows, self._draws(rows, size), size))
            self._buffers[size] = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return {size: self._inputs(rows, ALONE, size) for size, rows in empty_steps.items()}

    @torch.inference_mode()
    def inputs(self, rows: StepRows, gather: Gather) -> DeviceInputs:
        return self._inputs(rows, gather, self._bucket(rows))

    def _inputs(self, rows: StepRows, gather: Gather, bucket: int | None) -> DeviceInputs:
        draws = self._draws(rows, bucket or 0)
        whole = self._arrays(rows, draws, bucket)
        if bucket is None:
            arrays = self._staging.copy({**whole, **draws.changes})
        else:
            arrays = self._staging.copy(whole, self._buffers[bucket])
            if draws.changes:
                arrays |= self._staging.copy(draws.changes)
        tiles = Tiles(arrays["tiles"].view(-1, 4), arrays["tables"], self._arch.max_positions)
        rotations_RTf = None
        if self._rotary_tables:
            rotations_RTf = arrays["rotations"].view(len(self._rotary_tables), -1, self._arch.head_size)
        return DeviceInputs(
            rows=rows,
            token_ids_T=arrays["token_ids"],
            positions_T=arrays["positions"],
            read_rows_R=arrays["read_rows"],
            gather=gather,
            attend=partial(self._attend, arrays["slots"], tiles),
            rotations_RTf=rotations_RTf,
            arrays=arrays,
            draws=draws,
            bucket=bucket,
        )

    def fill(self, value: float) -> None:
        self.keys_LBpHd.fill_(value)
        self.values_LBpHd.fill_(value)

    def _bucket(self, rows: StepRows) -> int | None:
        """Return the smallest bucket that holds a step. None: a slice has several rows, a prompt is scored, or the
        step is too large."""
        num_rows = len(rows.slots_T)
        if num_rows != len(rows.num_rows_S) or any(s.targets for s in rows.plan.slices):
            return None
        return next((size for size in self._buffers if size >= num_rows), None)

    def _arrays(self, rows: StepRows, draws: Draws, bucket: int | None) -> dict[str, NDArray[Any]]:
        return {**draws.arrays(), **step_arrays(rows, self._layout, self._rotary_tables, bucket)}

    def _draws(self, rows: StepRows, pad_to: int) -> Draws:
        if not self._layout.is_last:
            return Draws.from_rows([], self._arch.vocab_size)
        read = rows_read(rows.plan)
        return Draws.from_rows(read + [ReadRow()] * (pad_to - len(read)), self._arch.vocab_size)

    def _attend(
        self, slots_T: torch.Tensor, tiles: Tiles, layer: int, qkv_TE: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """See `stock.Attend`. slots_T, tiles: those of the step."""
        keys_BpHd = self.keys_LBpHd[layer]
        values_BpHd = self.values_LBpHd[layer]
        self.operators.write(qkv_TE, keys_BpHd, values_BpHd, slots_T)
        return self.operators.attend(qkv_TE, keys_BpHd, values_BpHd, tiles, spec)


def step_arrays(
    rows: StepRows, layout: StageLayout, tables: Sequence[RotaryTable] = (), pad_to: int | None = None
) -> dict[str, NDArray[Any]]:
    """Return a step's arrays: int32, apart from rotations, which are float32. Block tables come last, because
    their size differs from step to step.

    pad_to: make it a step of so many rows, the last of which are padding; no slice may have several rows. In these
    arrays a row of padding has slot -1 and its tile begins at position -1, which tells the operators that it
    writes nothing and attends to nothing.
    """
    positions_T = _extended(rows.positions_T, pad_to, 0)
    rotations_RTf = rotations_of(tables, positions_T)
    arrays = {
        "token_ids": _extended(rows.token_ids_T, pad_to if layout.is_first else None, 0),
        "positions": positions_T,
        "slots": _extended(rows.slots_T, pad_to, -1),
        "read_rows": _extended(rows.read_rows, pad_to if layout.is_last else None, 0),
        "tiles": _tiles(rows, pad_to),
    }
    return {
        **{name: array.astype(np.int32) for name, array in arrays.items()},
        **({} if rotations_RTf is None else {"rotations": rotations_RTf}),
        "tables": rows.tables.astype(np.int32),
    }


def _extended(numbers: Ints, count: int | None, filler: int) -> Ints:
    """Return as many numbers as `count`; None: leave them as they are."""
    if count is None:
        return numbers
    return np.concatenate([numbers, np.full(count - len(numbers), filler, np.int64)])


def _empty_step(num_blocks: int) -> StepRows:
    """Return a step without slices, with block tables of so many blocks."""
    tables = np.zeros(num_blocks, np.int64)
    return StepRows(_NO_PLAN, _NONE, _NONE, _NONE, _NONE, _NONE, _NONE, tables, _NONE, _NONE)


def bucket_sizes(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4 and so on below `most`, and then `most`."""
    powers = (1 << exponent for exponent in range(most.bit_length()))
    return tuple(sorted({*(power for power in powers if power < most), most}))


def _tiles(rows: StepRows, pad_to: int | None) -> Ints:
    """Return the tiles of a step, each of up to ROWS_PER_TILE rows of a slice, as `operators.Tiles` has them. Each
    row of padding has one of its own."""
    tiles_per_slice = -(-rows.num_rows_S // ROWS_PER_TILE)
    slice_of = np.repeat(np.arange(len(rows.num_rows_S)), tiles_per_slice)
    first_tile_S = np.cumsum(tiles_per_slice) - tiles_per_slice
    count = len(slice_of)
    offset = (np.arange(count) - first_tile_S[slice_of]) * ROWS_PER_TILE
    tiles = np.empty((pad_to or count, 4), np.int64)
    tiles[:count, 0] = rows.first_row_S[slice_of] + offset
    tiles[:count, 1] = np.minimum(rows.num_rows_S[slice_of] - offset, ROWS_PER_TILE)
    tiles[:count, 2] = rows.start_S[slice_of] + offset
    tiles[:count, 3] = rows.table_begin_S[slice_of]
    tiles[count:, 0] = np.arange(count, len(tiles))
    tiles[count:, 1:] = 1, -1, 0
    return tiles
