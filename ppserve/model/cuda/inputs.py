"""The arrays of a step as the device takes them, and the places of those that recorded steps read.

A recorded step finds its arrays at the same addresses every time. A bucket is a number of rows. A step of one row
per slice is padded to the smallest bucket that holds it. T rows, S slices, n tiles.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ppserve.core.architecture import Architecture, StageLayout
from ppserve.core.plan import StepPlan
from ppserve.model.backend import Ints, StepRows
from ppserve.model.cuda.draws import Draws, rows_of_slices
from ppserve.model.cuda.operators import ROWS_PER_TILE
from ppserve.model.cuda.transfers import Places, Staging

NO_SLOT, NO_POSITION = -1, -1
_NO_PLAN = StepPlan(0, 0, 0, ())
_NONE = np.zeros(0, np.int64)


def step_arrays(rows: StepRows) -> dict[str, NDArray[Any]]:
    """All int32. Block tables come last, so that the unused end of a bucket's buffer is not copied."""
    return {
        "token_ids": rows.token_ids_T.astype(np.int32),
        "positions": rows.positions_T.astype(np.int32),
        "slots": rows.slots_T.astype(np.int32),
        "read_rows": rows.read_rows.astype(np.int32),
        "tiles": _tiles(rows).astype(np.int32),
        "tables": rows.tables.astype(np.int32),
    }


def padded(rows: StepRows, num_rows: int, layout: StageLayout) -> StepRows:
    """A step of one row per slice with as many rows as asked for, all of them read out in the order of slices.

    The added rows have no keys and no slot, and write nothing.
    """
    return replace(
        rows,
        token_ids_T=_extended(rows.token_ids_T, num_rows if layout.is_first else 0, 0),
        positions_T=_extended(rows.positions_T, num_rows, 0),
        slots_T=_extended(rows.slots_T, num_rows, NO_SLOT),
        first_row_S=np.arange(num_rows),
        num_rows_S=np.ones(num_rows, np.int64),
        start_S=_extended(rows.start_S, num_rows, NO_POSITION),
        table_begin_S=_extended(rows.table_begin_S, num_rows, 0),
        read_rows=np.arange(num_rows),
    )


def padding(size: int, layout: StageLayout) -> StepRows:
    """A step of rows that have no keys, and of which nothing is kept."""
    tables = np.zeros(1, np.int64)
    none = StepRows(_NO_PLAN, _NONE, _NONE, _NONE, _NONE, _NONE, _NONE, tables, _NONE, _NONE, ())
    return padded(none, size, layout)


def bucket_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 4 and so on, up to `most`, which is always one of them."""
    powers = (1 << exponent for exponent in range(most.bit_length()))
    return tuple(sorted({*(power for power in powers if power < most), most}))


class Buckets:
    """One buffer with room for the largest bucket, in which every array keeps its place."""

    def __init__(
        self, sizes: tuple[int, ...], arch: Architecture, layout: StageLayout, block_size: int, staging: Staging
    ) -> None:
        assert sizes == tuple(sorted(sizes)), "buckets are tried from the smallest on"
        self.sizes = sizes
        """Ascending."""
        self._layout, self._staging = layout, staging
        most = sizes[-1]
        nothing = self._padding(most)
        longest_tables = np.zeros(most * -(-arch.max_positions // block_size), np.int32)
        self._places = Places.for_arrays({**nothing, "tables": longest_tables})
        self._buffer = torch.zeros(self._places.num_bytes, dtype=torch.uint8, device=staging.device)
        staging.make_room(self._places.num_bytes)
        # So that recording touches nothing: no row of padding is kept.
        self.put(nothing)

    def smallest(self, rows: StepRows) -> int | None:
        """The smallest size that holds this step. None if a slice has several rows, or a prompt is scored."""
        num_rows = len(rows.slots_T)
        if num_rows != len(rows.num_rows_S) or any(s.targets for s in rows.plan.slices):
            return None
        return next((size for size in self.sizes if size >= num_rows), None)

    def put(self, arrays: dict[str, NDArray[Any]]) -> None:
        """Copies a padded step's arrays to their places."""
        self._staging.copy(arrays, self._places, self._buffer)

    def views(self, size: int) -> dict[str, torch.Tensor]:
        """The arrays of a bucket, each with its number of rows; block tables whole."""
        sizes = {name: array.size for name, array in self._padding(size).items()}
        views = self._places.views(self._buffer)
        return {name: view if name == "tables" else view[: sizes[name]] for name, view in views.items()}

    def _padding(self, size: int) -> dict[str, NDArray[Any]]:
        draws = Draws.of_rows(rows_of_slices(_NO_PLAN, size) if self._layout.is_last else (), 0)
        return {**draws.arrays(), **step_arrays(padding(size, self._layout))}


def _extended(numbers: Ints, count: int, filler: int) -> Ints:
    return np.concatenate([numbers, np.full(count - len(numbers), filler, np.int64)])


def _tiles(rows: StepRows) -> Ints:
    """Every slice's rows in groups of up to ROWS_PER_TILE: (first row, number of rows, position of the first row,
    begin of its table)."""
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
