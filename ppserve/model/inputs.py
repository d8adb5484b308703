"""What all layers of a stage share in one step, computed once from the plan.

T rows (tokens of all slices, packed), S slices.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from ppserve.core.architecture import StageLayout
from ppserve.core.plan import StepPlan

Ints = NDArray[np.int64]

ROWS_PER_TILE = 4


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Rows are the slices' tokens one after the other; everything is indexed by row or by slice.

    token_ids_T, positions_T: tensors on the stage's device. slots_T: where a row's key and value go, as
    block * block_size + offset. first_row_S, num_rows_S, start_S: each slice's rows and the position of
    its first. tables, table_begin_S: all block tables one after the other, and where each slice's begins.
    tiles: (row, number of rows, position of the first, where its table begins) of up to ROWS_PER_TILE
    consecutive rows of one slice. read_rows: the rows that go through the head: first those that are
    drawn from, in slice order, then those that are scored. copies: (source, destination) blocks.
    highest_block: the greatest block id mentioned anywhere, -1 for none.
    """

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: Ints
    first_row_S: Ints
    num_rows_S: Ints
    start_S: Ints
    tables: Ints
    table_begin_S: Ints
    tiles: Ints
    read_rows: Ints
    copies: tuple[tuple[int, int], ...]
    highest_block: int

    @property
    def num_rows(self) -> int:
        return len(self.slots_T)


def build_inputs(plan: StepPlan, layout: StageLayout, block_size: int, device: torch.device) -> StepInputs:
    """The step's inputs on `device`. Needs nothing but the plan, so it can run ahead of the data.

    Only the first stage gets token ids and only the last gets rows to read out; elsewhere they are empty.
    """
    slices = plan.slices
    count = len(slices)
    num_rows_S = np.fromiter((len(s.token_ids) for s in slices), np.int64, count)
    start_S = np.fromiter((s.start for s in slices), np.int64, count)
    table_sizes_S = np.fromiter((len(s.block_table) for s in slices), np.int64, count)
    tables = np.fromiter(chain.from_iterable(s.block_table for s in slices), np.int64, int(table_sizes_S.sum()))
    first_row_S = _starts(num_rows_S)
    table_begin_S = _starts(table_sizes_S)
    assert (table_sizes_S * block_size >= start_S + num_rows_S).all(), "a block table is too short for its slice"

    slice_T = np.repeat(np.arange(count), num_rows_S)
    positions_T = np.arange(len(slice_T)) - first_row_S[slice_T] + start_S[slice_T]
    blocks_T = tables[table_begin_S[slice_T] + positions_T // block_size]
    token_ids_T = _token_ids(plan) if layout.is_first else np.empty(0, np.int64)
    mentioned = max((block for copy in plan.copies for block in copy), default=-1)
    return StepInputs(
        token_ids_T=torch.from_numpy(token_ids_T).to(device),
        positions_T=torch.from_numpy(positions_T).to(device),
        slots_T=blocks_T * block_size + positions_T % block_size,
        first_row_S=first_row_S,
        num_rows_S=num_rows_S,
        start_S=start_S,
        tables=tables,
        table_begin_S=table_begin_S,
        tiles=_tiles(first_row_S, num_rows_S, start_S, table_begin_S),
        read_rows=_read_rows(plan, first_row_S) if layout.is_last else np.empty(0, np.int64),
        copies=plan.copies,
        highest_block=max(mentioned, int(tables.max(initial=-1))),
    )


def _starts(sizes: Ints) -> Ints:
    """Where each of several consecutive runs begins."""
    return np.cumsum(sizes) - sizes


def _token_ids(plan: StepPlan) -> Ints:
    return np.fromiter(chain.from_iterable(s.token_ids for s in plan.slices), np.int64, plan.num_tokens)


def _tiles(first_row_S: Ints, num_rows_S: Ints, start_S: Ints, table_begin_S: Ints) -> Ints:
    """Every slice's rows in groups of up to ROWS_PER_TILE, as rows of `StepInputs.tiles`."""
    tiles_per_slice = -(-num_rows_S // ROWS_PER_TILE)
    slice_of = np.repeat(np.arange(len(num_rows_S)), tiles_per_slice)
    offset = (np.arange(len(slice_of)) - _starts(tiles_per_slice)[slice_of]) * ROWS_PER_TILE
    tiles = np.empty((len(slice_of), 4), np.int64)
    tiles[:, 0] = first_row_S[slice_of] + offset
    tiles[:, 1] = np.minimum(num_rows_S[slice_of] - offset, ROWS_PER_TILE)
    tiles[:, 2] = start_S[slice_of] + offset
    tiles[:, 3] = table_begin_S[slice_of]
    return tiles


def _read_rows(plan: StepPlan, first_row_S: Ints) -> Ints:
    """Rows of hidden states that the head reads: the drawn ones, then the scored ones."""
    drawn = [first + len(s.token_ids) - 1 for s, first in zip(plan.slices, first_row_S, strict=True) if s.draw]
    scored = [
        np.arange(first, first + len(s.targets))
        for s, first in zip(plan.slices, first_row_S, strict=True)
        if s.targets
    ]
    return np.concatenate([np.asarray(drawn, np.int64), *scored])
