"""The memory that the threads of a stage write while they work. It is taken once, and anew when a step needs more.

T rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppserve.model.cpu.kernels.attention import AttentionScratch, CacheShape
from ppserve.model.cpu.kernels.attention_tile import GROUP, AttentionKernel
from ppserve.model.cpu.kernels.memory import LINE_BYTES, address, aligned
from ppserve.model.cpu.kernels.products import Scratch, Weights
from ppserve.model.cpu.kernels.tile_code import MicroKernel


class ScratchMemory:
    """Scratch memory that all steps of a stage share: no step leaves anything in it for the next. A prepared step
    keeps its arrays alive, also when later ones get larger arrays."""

    def __init__(self, kind: MicroKernel, num_threads: int) -> None:
        """kind: the micro-kernel of the products."""
        self._kind, self._num_threads = kind, num_threads
        self._chunks = self._outputs = 0
        # Arrays by name, each with its address: asking an array for its address takes longer than keeping it.
        self._arrays: dict[str, tuple[NDArray[Any], int]] = {}

    def fit(self, weights: Weights) -> None:
        """Make the memory large enough for products with these weights."""
        self._chunks, self._outputs = max(self._chunks, weights.chunks), max(self._outputs, weights.outputs)

    def of_step(self, num_rows: int) -> tuple[Scratch, list[NDArray[Any]]]:
        """Return the memory that a step of so many rows writes, and the arrays that must live as long as the step.
        The first array is y, the results of products."""
        kind = self._kind
        tile_rows = kind.tile_rows(num_rows)
        # A tile is always whole: results of rows after the last one are computed and never read.
        rows, width = -(-num_rows // tile_rows) * tile_rows, self._chunks * kind.chunk_inputs
        arrays = [
            # Whole panels are read: with the last value of the last row, 15 behind it.
            self._array("y", rows * self._outputs + GROUP, np.float32),
            self._array("words", rows * self._chunks * kind.row_bytes // 4, np.int32),
            self._array("scales", rows, np.float32),
            self._array("inner", num_rows * width, np.float32),
            self._array("values", self._num_threads * width, np.float32),
        ]
        y, words, scales, inner, values = (place for _, place in arrays)
        scratch = Scratch(num_rows, tile_rows, words, scales, y, inner, values, 4 * width)
        return scratch, [array for array, _ in arrays]

    def of_attention(
        self, kind: AttentionKernel, cache: CacheShape, most_positions: int
    ) -> tuple[list[AttentionScratch], list[NDArray[Any]]]:
        """Return the memory that each thread writes in attention, and the arrays that must live as long as the
        step. most_positions: the most positions of a sequence in the step."""
        rows = kind.rows_of_tiles(cache.num_heads * cache.queries_per_kv_head, cache.queries_per_kv_head)
        most_groups = -(-most_positions // cache.block_size) * -(-cache.block_size // GROUP)
        most_groups += max(kind.panels, kind.groups_ahead)
        # A tile writes whole groups, and one may begin at the last position.
        stride = 4 * (-(-most_positions // GROUP) + 1) * GROUP
        row_of_sums = -(-cache.head_size // GROUP) * GROUP
        sizes = {
            "groups": 6 * 8 * most_groups,
            "queries": 4 * rows * cache.head_size,
            "scores": rows * stride,
            "sums": 4 * kind.most_rows * (row_of_sums + 1),
        }
        arrays, places = [], []
        for name, size in sizes.items():
            # Each thread's part begins on a cache line of its own.
            apart = -(-size // LINE_BYTES) * LINE_BYTES
            array, begin = self._array(name, apart * (self._num_threads - 1) + size, np.uint8)
            arrays.append(array)
            places.append(range(begin, begin + apart * self._num_threads, apart))
        return [
            AttentionScratch(groups, most_groups, queries, scores, stride, sums)
            for groups, queries, scores, sums in zip(*places, strict=True)
        ], arrays

    def _array(self, name: str, size: int, dtype: type) -> tuple[NDArray[Any], int]:
        """Return an array of at least `size` numbers, and its address. An array that has become too small is
        replaced by one of half as much again as is needed."""
        held = self._arrays.get(name)
        if held is None or held[0].size < size:
            array = aligned(size if held is None else size * 3 // 2, dtype)
            self._arrays[name] = held = array, address(array)
        return held
