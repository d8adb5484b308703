"""The memory that the threads of a stage write while they work: taken once, and again when a step needs more.

T rows.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppserve.model.cpu.kernels.attention import AttentionScratch
from ppserve.model.cpu.kernels.attention_tile import GROUP, AttentionKernel
from ppserve.model.cpu.kernels.memory import LINE_BYTES, address, aligned
from ppserve.model.cpu.kernels.products import Weights
from ppserve.model.cpu.kernels.tile_code import PANEL, MicroKernel
from ppserve.model.cpu.kernels.work import CacheShape, Scratch

_ROWS_AT_FIRST = 64


class ScratchMemory:
    """kind: of the products. Nothing in a room outlives a job, so all steps share one; a step that was prepared
    keeps the arrays that it was prepared with."""

    def __init__(self, kind: MicroKernel, num_threads: int) -> None:
        self._kind, self._num_threads = kind, num_threads
        self._chunks = self._outputs = 0
        # Each with its address, which takes longer to ask for than to remember.
        self._arrays: dict[str, tuple[NDArray[Any], int]] = {}

    def fit_rows(self, weights: Weights) -> None:
        """Rows for these weights will be packed."""
        self._chunks = max(self._chunks, weights.chunks)

    def fit_results(self, weights: Weights) -> None:
        """Products with these weights will be kept here."""
        self._outputs = max(self._outputs, weights.outputs)

    def scratch(self, num_rows: int) -> tuple[Scratch, list[NDArray[Any]]]:
        """For a step, and what must be kept as long as it is used."""
        kind = self._kind
        # Tiles are whole; the rows behind the last are computed and never read.
        rows = max(num_rows, _ROWS_AT_FIRST) + kind.rows[-1]
        width = self._chunks * PANEL * kind.inputs + GROUP
        arrays = [
            self._array("words", rows * self._chunks * PANEL * kind.steps, np.int32),
            self._array("scales", rows, np.float32),
            self._array("y", rows * self._outputs + LINE_BYTES, np.float32),
            self._array("mixed", rows * width, np.float32),
            self._array("values", self._num_threads * width, np.float32),
        ]
        words, scales, y, mixed, values = (place for _, place in arrays)
        scratch = Scratch(num_rows, words, scales, y, mixed, 4 * width, values, 4 * width)
        return scratch, [array for array, _ in arrays]

    def attention_scratch(
        self, kind: AttentionKernel, cache: CacheShape, most_positions: int
    ) -> tuple[list[AttentionScratch], NDArray[Any]]:
        """One for each thread."""
        rows = max(cache.num_heads, kind.rows[-1])
        most_groups = -(-most_positions // cache.block_size) * -(-cache.block_size // GROUP)
        most_groups += max(kind.panels, kind.groups_ahead)
        # A tile writes whole groups, also behind the last position.
        stride = 4 * (-(-most_positions // GROUP) + kind.panels + 1) * GROUP
        panels = -(-cache.head_size // GROUP)
        groups, queries = 6 * 8 * most_groups, 4 * (rows * cache.head_size + GROUP)
        scores, sums = rows * stride, 4 * (kind.rows[-1] * panels + 1) * GROUP
        sizes = [-(-size // LINE_BYTES) * LINE_BYTES for size in (groups, queries, scores, sums)]
        memory, begin = self._array("attention", self._num_threads * sum(sizes), np.uint8)
        scratch_memory = []
        for _ in range(self._num_threads):
            at = [*accumulate(sizes, initial=begin)]
            scratch_memory.append(AttentionScratch(at[0], most_groups, at[1], at[2], stride, at[3]))
            begin = at[4]
        return scratch_memory, memory

    def _array(self, name: str, size: int, dtype: type) -> tuple[NDArray[Any], int]:
        """At least so many numbers, and where; half as many again when more are needed than there are."""
        held = self._arrays.get(name)
        if held is None or held[0].size < size:
            array = aligned(size if held is None else size * 3 // 2, dtype)
            self._arrays[name] = held = array, address(array)
        return held
