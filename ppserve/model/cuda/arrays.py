"""The arrays of a step as the device takes them, from the plan's; optionally padded to a number of rows.

T rows, S slices, n tiles.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppserve.model.backend import Ints, StepRows
from ppserve.model.cuda.operators import ROWS_PER_TILE

NO_SLOT, NO_POSITION = -1, -1


def step_arrays(rows: StepRows) -> dict[str, NDArray[Any]]:
    """All int32. Block tables come last: of a buffer with room for the longest, the rest need not be copied."""
    return {
        "token_ids": rows.token_ids_T.astype(np.int32),
        "positions": rows.positions_T.astype(np.int32),
        "slots": rows.slots_T.astype(np.int32),
        "read_rows": rows.read_rows.astype(np.int32),
        "tiles": tiles_of(rows).astype(np.int32),
        "tables": rows.tables.astype(np.int32),
    }


def padded_arrays(rows: StepRows, num_rows: int) -> dict[str, NDArray[Any]]:
    """For a step of one row per slice: as many rows as asked for. The added ones have no keys and no slot, and
    write nothing. Every row is read out, in the order of slices."""
    more = num_rows - len(rows.slots_T)
    tiles = np.zeros((num_rows, 4), np.int32)
    tiles[:, 0], tiles[:, 1] = np.arange(num_rows), 1
    tiles[:, 2], tiles[:, 3] = _longer(rows.start_S, more, NO_POSITION), _longer(rows.table_begin_S, more, 0)
    return {
        "token_ids": _longer(rows.token_ids_T, more, 0) if len(rows.token_ids_T) else np.empty(0, np.int32),
        "positions": _longer(rows.positions_T, more, 0),
        "slots": _longer(rows.slots_T, more, NO_SLOT),
        "read_rows": np.arange(num_rows, dtype=np.int32),
        "tiles": tiles,
        "tables": rows.tables.astype(np.int32),
    }


def _longer(numbers: Ints, more: int, filler: int) -> NDArray[np.int32]:
    return np.concatenate([numbers, np.full(more, filler, np.int64)]).astype(np.int32)


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
