"""What all layers of a stage share in one step, computed once from the plan.

T rows (tokens of all slices, packed), S slices.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np

from ppserve.core.architecture import StageLayout
from ppserve.core.plan import StepPlan
from ppserve.model.backend import Ints, KVCache, StepInputs, StepRows
from ppserve.model.gather import Gather


def build_inputs(plan: StepPlan, layout: StageLayout, cache: KVCache, gather: Gather | None = None) -> StepInputs:
    """The step's inputs, for this cache. Needs nothing but the plan, so it can run ahead of the data.

    gather: to the stage's other tensor ranks, if there are any.

    Only the first stage gets token ids and only the last gets rows to read out; elsewhere they are empty.
    """
    slices, block_size = plan.slices, cache.block_size
    count = len(slices)
    num_rows_S = np.fromiter((len(s.token_ids) for s in slices), np.int64, count)
    start_S = np.fromiter((s.start for s in slices), np.int64, count)
    table_sizes_S = np.fromiter((len(s.block_table) for s in slices), np.int64, count)
    tables = np.fromiter(chain.from_iterable(s.block_table for s in slices), np.int64, int(table_sizes_S.sum()))
    first_row_S = _starts(num_rows_S)
    table_begin_S = _starts(table_sizes_S)
    assert (table_sizes_S * block_size >= start_S + num_rows_S).all(), "a block table is too short for its slice"

    slice_T = np.repeat(np.arange(count), num_rows_S)
    positions_T = _runs(start_S, num_rows_S)
    blocks_T = tables[table_begin_S[slice_T] + positions_T // block_size]
    token_ids_T = np.fromiter(chain.from_iterable(s.token_ids for s in slices if layout.is_first), np.int64)
    rows = StepRows(
        plan=plan,
        token_ids_T=token_ids_T,
        positions_T=positions_T,
        slots_T=blocks_T * block_size + positions_T % block_size,
        first_row_S=first_row_S,
        num_rows_S=num_rows_S,
        start_S=start_S,
        tables=tables,
        table_begin_S=table_begin_S,
        read_rows=_read_rows(plan, first_row_S, num_rows_S) if layout.is_last else np.empty(0, np.int64),
    )
    assert tables.max(initial=-1) < cache.num_blocks, "a plan names a block that the cache does not have"
    inputs = cache.inputs(rows)
    return inputs if gather is None else replace(inputs, gather=gather)


def _starts(sizes: Ints) -> Ints:
    """Where each of several consecutive runs begins."""
    return np.cumsum(sizes) - sizes


def _runs(first: Ints, sizes: Ints) -> Ints:
    """Consecutive numbers, so many from each of `first` on."""
    return np.arange(sizes.sum()) - np.repeat(_starts(sizes) - first, sizes)


def _read_rows(plan: StepPlan, first_row_S: Ints, num_rows_S: Ints) -> Ints:
    """Rows of hidden states that the head reads: the drawn ones, then the scored ones."""
    drawn_S = np.fromiter((s.num_draws for s in plan.slices), np.int64, len(plan.slices))
    scored_S = np.fromiter((len(s.targets) for s in plan.slices), np.int64, len(plan.slices))
    return np.concatenate([_runs(first_row_S + num_rows_S - drawn_S, drawn_S), _runs(first_row_S, scored_S)])
