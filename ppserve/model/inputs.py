"""The inputs of a step, which all layers of a stage share: they are computed from the plan.

Each tensor rank computes some columns of the rows, and needs all of them. No sum is divided between ranks, so they
only exchange whole columns (docs/decisions/tensor-parallelism.md).

T rows (tokens of all slices, packed), S slices, R rows read out, N columns, n those of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ppserve.core.architecture import Cut, StageLayout
from ppserve.core.plan import StepPlan

Ints = NDArray[np.int64]


class Gather(Protocol):
    """Exchanges columns between the tensor ranks of a stage. All ranks make the same calls in the same order."""

    @property
    def waited_ns(self) -> int:
        """How long this rank has waited for the others so far, in nanoseconds."""

    def all(self, own_Tn: torch.Tensor, cut: Cut) -> torch.Tensor:
        """Return the columns of all ranks side by side, (T, N), contiguous. Raises TransportError if a rank is
        gone.

        own_Tn: this rank's columns; the tensor may be reused afterwards. cut: how the ranks share the columns.
        """


class Alone:
    """A `Gather` that exchanges nothing. If the stage has other ranks, this rank's columns stand in for theirs, as
    in a self-test or a measurement."""

    waited_ns = 0

    def all(self, own_Tn: torch.Tensor, cut: Cut) -> torch.Tensor:
        times = -(-cut.size // cut.width)
        return own_Tn if times == 1 else own_Tn.repeat(1, times)[:, : cut.size].contiguous()


ALONE = Alone()


@dataclass(frozen=True, slots=True)
class StepRows:
    """A plan as arrays on the host: where its rows stand in their sequences and in the KV blocks.

    token_ids_T: empty after the first stage. slots_T: where a row's key and value are written, as block *
    block_size + offset. first_row_S, num_rows_S: the rows of each slice. start_S: the position of its first row.
    tables: all block tables, one after the other. table_begin_S: where each of them begins. read_rows: the rows
    that the LM head reads, empty before the last stage: first those from which tokens are drawn, in the order of
    slices, then those that are scored.
    """

    plan: StepPlan
    token_ids_T: Ints
    positions_T: Ints
    slots_T: Ints
    first_row_S: Ints
    num_rows_S: Ints
    start_S: Ints
    tables: Ints
    table_begin_S: Ints
    read_rows: Ints


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of a step. Its rows are the tokens of all slices, one slice after the other.

    Each kind of cache has a subclass, which adds what its backend needs for attention.
    """

    rows: StepRows
    token_ids_T: torch.Tensor  # this and the next two: as in `rows`, on the stage's device
    positions_T: torch.Tensor
    read_rows_R: torch.Tensor
    gather: Gather  # to the other tensor ranks of the stage

    @property
    def num_rows(self) -> int:
        """How many rows are computed. A backend may have padded the step, which `rows` does not show."""
        return len(self.positions_T)

    def with_plan(self, plan: StepPlan) -> Self:
        """Return the inputs of a plan that differs from this one only in its masks."""
        return replace(self, rows=replace(self.rows, plan=plan))


Inputs = TypeVar("Inputs", bound=StepInputs)
"""A backend's own inputs of a step."""
MadeInputs = TypeVar("MadeInputs", bound=StepInputs, covariant=True)
"""A backend's own inputs of a step, where they are only made."""


class KVCache(Protocol[MadeInputs]):
    """One stage's keys and values, in preallocated blocks that are addressed by their ids.

    A block is written before it is read, so blocks are never erased.
    """

    num_blocks: int
    block_size: int

    def inputs(self, rows: StepRows, gather: Gather) -> MadeInputs:
        """Prepare a step. This touches no block, so it can be done before the previous step is computed."""

    def fill(self, value: float) -> None:
        """Set every number in the cache to this value."""


def build_inputs(plan: StepPlan, layout: StageLayout, cache: KVCache[Inputs], gather: Gather = ALONE) -> Inputs:
    """Prepare a step's inputs. They depend on the plan alone, so they can be made before the hidden states
    arrive."""
    slices, block_size = plan.slices, cache.block_size
    count = len(slices)
    num_rows_S = np.fromiter((len(s.token_ids) for s in slices), np.int64, count)
    start_S = np.fromiter((s.start for s in slices), np.int64, count)
    table_sizes_S = np.fromiter((len(s.block_table) for s in slices), np.int64, count)
    tables = np.fromiter(chain.from_iterable(s.block_table for s in slices), np.int64, int(table_sizes_S.sum()))
    first_row_S = _starts(num_rows_S)
    table_begin_S = _starts(table_sizes_S)
    assert num_rows_S.all(), "a plan that was sent ahead of its tokens has none yet"
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
    return cache.inputs(rows, gather)


def _starts(sizes: Ints) -> Ints:
    """Return where each of several consecutive runs begins."""
    return np.cumsum(sizes) - sizes


def _runs(first: Ints, sizes: Ints) -> Ints:
    """Return runs of consecutive numbers, one after the other. first, sizes: each run's first number and
    length."""
    return np.arange(sizes.sum()) - np.repeat(_starts(sizes) - first, sizes)


def _read_rows(plan: StepPlan, first_row_S: Ints, num_rows_S: Ints) -> Ints:
    """Return the rows that the LM head reads: those that are drawn from, then those that are scored."""
    drawn_S = np.fromiter((s.num_draws for s in plan.slices), np.int64, len(plan.slices))
    scored_S = np.fromiter((len(s.targets) for s in plan.slices), np.int64, len(plan.slices))
    return np.concatenate([_runs(first_row_S + num_rows_S - drawn_S, drawn_S), _runs(first_row_S, scored_S)])
