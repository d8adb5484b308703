"""The arrays of a step as the device takes them, also padded to the size of a recorded step.

T rows, S slices, n tiles.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppserve.core.architecture import StageLayout
from ppserve.core.plan import StepPlan
from ppserve.model.backend import Ints, StepRows
from ppserve.model.cuda.operators import ROWS_PER_TILE

NO_SLOT, NO_POSITION = -1, -1
_NO_PLAN = StepPlan(0, 0, 0, ())
_NONE = np.zeros(0, np.int64)


def step_arrays(rows: StepRows) -> dict[str, NDArray[Any]]:
    """All int32. Block tables come last: their size differs between steps of one size."""
    return {
        "token_ids": rows.token_ids_T.astype(np.int32),
        "positions": rows.positions_T.astype(np.int32),
        "slots": rows.slots_T.astype(np.int32),
        "read_rows": rows.read_rows.astype(np.int32),
        "tiles": _tiles(rows).astype(np.int32),
        "tables": rows.tables.astype(np.int32),
    }


def padded(rows: StepRows, num_rows: int, layout: StageLayout) -> StepRows:
    """A step of one row per slice with as many rows as asked for. On the last stage, as many are read out.

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
        read_rows=_extended(rows.read_rows, num_rows if layout.is_last else 0, 0),
    )


def padding(num_rows: int, num_blocks: int, layout: StageLayout) -> StepRows:
    """A step of padding alone, with block tables of so many blocks."""
    tables = np.zeros(num_blocks, np.int64)
    none = StepRows(_NO_PLAN, _NONE, _NONE, _NONE, _NONE, _NONE, _NONE, tables, _NONE, _NONE)
    return padded(none, num_rows, layout)


def bucket_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 4 and so on, up to `most`, which is always one of them."""
    powers = (1 << exponent for exponent in range(most.bit_length()))
    return tuple(sorted({*(power for power in powers if power < most), most}))


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
