"""Where the inputs of recorded steps lie: a recorded step finds its arrays at the same addresses every time.

A bucket is a number of rows. A step of one row per slice is padded to the smallest bucket that holds it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ppserve.core.architecture import Architecture, StageLayout
from ppserve.core.plan import StepPlan
from ppserve.model.backend import StepRows
from ppserve.model.cuda.arrays import NO_POSITION, NO_SLOT, padded_arrays
from ppserve.model.cuda.draws import Draws, rows_of_slices
from ppserve.model.cuda.staging import Places, Staging

_NO_PLAN = StepPlan(0, 0, 0, ())


def bucket_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 4 and so on, up to `most`, which is always one of them."""
    powers = (1 << exponent for exponent in range(most.bit_length()))
    return tuple(sorted({*(power for power in powers if power < most), most}))


def padding(size: int, layout: StageLayout) -> StepRows:
    """A step of rows that have no keys, and of which nothing is kept."""
    zeros = np.zeros(size, np.int64)
    return StepRows(
        plan=_NO_PLAN,
        token_ids_T=zeros[: size if layout.is_first else 0],
        positions_T=zeros,
        slots_T=np.full(size, NO_SLOT),
        first_row_S=np.arange(size),
        num_rows_S=np.ones(size, np.int64),
        start_S=np.full(size, NO_POSITION),
        tables=np.zeros(1, np.int64),
        table_begin_S=zeros,
        read_rows=np.arange(size if layout.is_last else 0),
        copies=(),
        highest_block=-1,
    )


class Buckets:
    """One buffer with room for the largest bucket, in which every array keeps its place. sizes: ascending."""

    def __init__(
        self, sizes: tuple[int, ...], arch: Architecture, layout: StageLayout, block_size: int, staging: Staging
    ) -> None:
        assert sizes == tuple(sorted(sizes)), "buckets are tried from the smallest on"
        self.sizes = sizes
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
        self._staging.put(arrays, self._places, self._buffer)

    def views(self, size: int) -> dict[str, torch.Tensor]:
        """The arrays of a bucket, each with its number of rows; block tables whole."""
        sizes = {name: array.size for name, array in self._padding(size).items()}
        views = self._places.views(self._buffer)
        return {name: view if name == "tables" else view[: sizes[name]] for name, view in views.items()}

    def _padding(self, size: int) -> dict[str, NDArray[Any]]:
        draws = Draws.of(rows_of_slices(_NO_PLAN, size) if self._layout.is_last else (), 0)
        return {**draws.arrays(), **padded_arrays(padding(size, self._layout), size)}
