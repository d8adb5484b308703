"""Attention by the kernels, for tests: a cache of one layer and steps over it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ppserve.model.compiled.jit import kernel
from ppserve.model.cpu.kernels.attention import CacheShape, Heads, StepSlices, attend, write_heads
from ppserve.model.cpu.kernels.attention_tile import AttentionKernel
from ppserve.model.cpu.kernels.memory import address, aligned
from ppserve.model.cpu.kernels.products import micro_kernels
from ppserve.model.cpu.kv_cache import cell_bytes
from ppserve.model.cpu.scratch import ScratchMemory
from ppserve.model.cpu.sublayers import NO_WINDOW

Floats = NDArray[np.float32]


@kernel
def write(kind, cache, slices, heads) -> None:  # type: ignore[no-untyped-def]
    write_heads(kind, cache, slices, heads)


@kernel
def run(kind, cache, slices, scratch, heads) -> None:  # type: ignore[no-untyped-def]
    attend(kind, cache, slices, scratch, heads)


@dataclass(frozen=True)
class Part:
    """Consecutive rows of one sequence in a step."""

    table: tuple[int, ...]
    start: int
    qkv: Floats


class Layer:
    def __init__(
        self,
        kind: AttentionKernel,
        num_heads: int,
        head_size: int,
        num_blocks: int,
        block_size: int = 16,
        queries_per_kv_head: int = 1,
        window: int = NO_WINDOW,
    ) -> None:
        """num_heads: of keys and values; queries_per_kv_head: heads of queries that read each of them."""
        self.kind, self.num_heads, self.head_size, self.block_size = kind, num_heads, head_size, block_size
        self.queries_per_kv_head, self.window = queries_per_kv_head, window
        self.key_cell, self.value_cell = cell_bytes(head_size, block_size, kind.element_bytes)
        self.keys = aligned(num_blocks * num_heads * self.key_cell, np.uint8)
        self.values = aligned(num_blocks * num_heads * self.value_cell, np.uint8)

    def fill(self, byte: int) -> None:
        self.keys[:], self.values[:] = byte, byte

    def step(self, parts: list[Part], cuts: tuple[int, ...] = ()) -> list[Floats]:
        """The outputs of each part's rows. cuts: where the heads are cut into calls, as threads would."""
        num_queries = self.num_heads * self.queries_per_kv_head
        width = num_queries * self.head_size
        stride = width + 2 * self.num_heads * self.head_size
        qkv = np.concatenate([part.qkv for part in parts] + [np.zeros((1, stride), np.float32)])
        counts = np.array([len(part.qkv) for part in parts])
        starts = np.array([part.start for part in parts])
        tables = np.concatenate([part.table for part in parts]).astype(np.int64)
        slots = np.concatenate([self._slots(part) for part in parts])
        first_rows = np.cumsum(counts) - counts
        table_begins = np.cumsum([0, *(len(part.table) for part in parts[:-1])])
        cache = CacheShape(
            address(self.keys), address(self.values), 0, self.num_heads, self.queries_per_kv_head, self.head_size,
            self.block_size, self.key_cell, self.value_cell,
        )  # fmt: skip
        arrays = (slots, first_rows, counts, starts, tables, table_begins)
        slices = StepSlices(len(slots), len(parts), 0, *(address(array) for array in arrays))
        scratch_memory = ScratchMemory(micro_kernels("float32", "portable", frozenset())[0], 1)
        (scratch,), kept = scratch_memory.of_attention(self.kind, cache, int((starts + counts).max()))
        mixed = aligned(len(slots) * width, np.float32).reshape(-1, width)
        layer = 0, np.float32(self.head_size**-0.5), self.window
        rows = address(qkv), 4 * stride, address(mixed), 4 * width
        write(self.kind, cache, slices, Heads(*rows, 0, 0, 0, self.num_heads, *layer))
        for first, end in pairwise((0, *cuts, num_queries)):
            run(self.kind, cache, slices, scratch, Heads(*rows, first, end, 0, 0, *layer))
        del kept
        return np.split(mixed, np.cumsum(counts)[:-1])

    def _slots(self, part: Part) -> NDArray[np.int64]:
        positions = part.start + np.arange(len(part.qkv))
        return np.array(part.table)[positions // self.block_size] * self.block_size + positions % self.block_size
