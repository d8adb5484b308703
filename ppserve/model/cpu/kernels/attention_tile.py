"""The code of attention's two products, over groups of keys and values that lie anywhere in memory.

A group is up to 16 consecutive positions of one KV block. Its keys are (d, 16) numbers, feature after feature. Its
values are panels of 16 features, each (positions, 16). Both are float32, bfloat16 or int8, and are loaded as
float32. Each score is one chain of fused multiply-adds over the features, in order, and each output is one over
the positions. So they have the same bits on every CPU, with any number of rows.

d features of a head. Addresses and strides are in bytes.
"""
# mypy: ignore-errors
# (numba types these functions from their arguments)

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ppserve.model.compiled.llvm import F32, I64, call, splat, vector
from ppserve.model.compiled.settings import setting
from ppserve.model.cpu.kernels.memory import LINE_BYTES
from ppserve.model.cpu.kernels.storage import ELEMENT_BYTES, load_stored
from ppserve.model.cpu.kernels.tile_code import Code
from ppserve.model.cpu.kernels.variants import included

GROUP = 16
"""How many positions a group has, and how many features a panel of values has."""


@setting
@dataclass(frozen=True)
class AttentionKernel:
    """The shape of an attention kernel.

    storage: how keys and values are stored, a key of ELEMENT_BYTES. lanes: elements of a vector register, 8 or 16.
    panels: how many groups of keys, or panels of values, a tile has. rows: the numbers of rows that a tile may
    have, ascending.
    """

    storage: str
    lanes: int
    panels: int
    rows: tuple[int, ...]

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.storage]

    @property
    def groups_ahead(self) -> int:
        """How many groups ahead values are prefetched: so many that they arrive before they are needed."""
        return 8 // self.element_bytes

    @property
    def most_rows(self) -> int:
        return self.rows[-1]

    def rows_of_tiles(self, heads: int, queries_per_kv_head: int) -> int:
        """Return the most rows that tiles write. A tile has some rows of one head, or some heads of one row,
        filled up to one of `rows`."""
        last = range(1, min(queries_per_kv_head, self.most_rows) + 1)
        return max(self.most_rows, *(heads - count + min(r for r in self.rows if r >= count) for count in last))


# A tile has as many sums as the registers hold: AVX2 has 16 registers, AVX-512 has 32.
_SHAPES = {"avx512": (16, 4, (1, 3, 6)), "portable": (8, 1, (1, 3, 6))}


def attention_kernels(storage: str, variant: str) -> list[AttentionKernel]:
    """List the kernels that `variant` includes, the best first."""
    return [AttentionKernel(storage, *shape) for name, shape in _SHAPES.items() if name in included(variant)]


class _AttentionCode(Code, ABC):
    """Emits the code of tiles: sums of products, 16 for each row and panel."""

    def __init__(self, builder, kind: AttentionKernel, panels: int) -> None:
        super().__init__(builder)
        self.kind, self.panels = kind, panels
        self.parts = GROUP // kind.lanes
        self.floats = vector(F32, kind.lanes)

    @abstractmethod
    def tile(self, rows: int) -> None:
        """Emit the code of a tile of so many rows."""

    def tile_for(self, size) -> None:
        """Emit code for each number of rows. The smallest number that is at least `size`, an LLVM value, is
        taken."""
        builder = self.builder
        done = builder.append_basic_block("done")
        for rows in self.kind.rows:
            here, more = builder.append_basic_block(f"{rows}_rows"), builder.append_basic_block("more")
            builder.cbranch(builder.icmp_signed("<=", size, I64(rows)), here, more)
            builder.position_at_end(here)
            self.tile(rows)
            builder.branch(done)
            builder.position_at_end(more)
        builder.branch(done)
        builder.position_at_end(done)

    def number(self, array, index):
        """Return an element of an array of int64. array: its address."""
        return self.load(self.nth(array, I64(8), index), 0, I64)

    def numbers_from(self, index):
        """Return how many bytes lie before the numbers of feature or position `index` of a group."""
        return self.builder.mul(index, I64(GROUP * self.kind.element_bytes))

    def zeros(self, rows: int):
        zero = ir.Constant(self.floats, [0.0] * self.kind.lanes)
        return [
            [cgutils.alloca_once_value(self.builder, zero) for _ in range(self.panels * self.parts)]
            for _ in range(rows)
        ]

    def step(self, totals, x, x_stride, panels) -> None:
        """Multiply one number of each row, the first of them at x, into 16 numbers of each panel."""
        builder = self.builder
        columns = [self._stored_at(place, part) for place in panels for part in range(self.parts)]
        for r, row in enumerate(totals):
            value = splat(builder, self.load(self.nth(x, x_stride, r), 0, F32), self.kind.lanes)
            for total, column in zip(row, columns, strict=True):
                name, addend = f"llvm.fma.v{self.kind.lanes}f32", builder.load(total)
                builder.store(call(builder, name, self.floats, value, column, addend), total)

    def _stored_at(self, address, part: int):
        """Load keys or values of a panel, as float32. part: which of the registers that hold 16 numbers."""
        place = self.builder.add(address, I64(part * self.kind.lanes * self.kind.element_bytes))
        return load_stored(self.builder, self.kind.storage, place, self.kind.lanes)

    def store_sums(self, totals, places, stride) -> None:
        """Store sums. places: the addresses of each panel's sums of the first row. stride: from row to row."""
        for r, row in enumerate(totals):
            for column, total in enumerate(row):
                panel, part = divmod(column, self.parts)
                place = self.nth(places[panel], stride, r)
                self.store(self.builder.load(total), place, 4 * part * self.kind.lanes)


class _Scores(_AttentionCode):
    """The code of `score`."""

    def __init__(self, builder, kind: AttentionKernel, arguments) -> None:
        super().__init__(builder, kind, kind.panels)
        self._queries, self._stride, self._size, groups, self._head, self._ahead, *self._scores = arguments
        self._keys, self._positions, self._scales = (builder.extract_value(groups, i) for i in range(3))

    def tile(self, rows: int) -> None:
        builder, totals = self.builder, self.zeros(rows)
        panels = [builder.add(self.number(self._keys, I64(p)), self._head) for p in range(self.panels)]
        with cgutils.for_range(builder, self._size) as loop:
            here = [builder.add(panel, self.numbers_from(loop.index)) for panel in panels]
            for place in here:
                self.fetch(builder.add(place, self._ahead))
            self.step(totals, self.nth(self._queries, I64(4), loop.index), self._stride, here)
        if self.kind.storage == "int8":
            self._multiply_scales(totals)
        scores, stride = self._scores
        self.store_sums(
            totals, [builder.add(scores, self.number(self._positions, I64(p))) for p in range(self.panels)], stride
        )

    def _multiply_scales(self, totals) -> None:
        for column in range(self.panels * self.parts):
            panel, part = divmod(column, self.parts)
            place = self.builder.add(self.number(self._scales, I64(panel)), self._head)
            scale = self.load(place, 4 * part * self.kind.lanes, self.floats)
            for row in totals:
                self.builder.store(self.builder.fmul(self.builder.load(row[column]), scale), row[column])


class _WeightedSums(_AttentionCode):
    """The code of `sum_values`, for a number of panels."""

    def __init__(self, builder, kind: AttentionKernel, panels: int, arguments) -> None:
        super().__init__(builder, kind, panels)
        self._weights, self._stride, self._num_groups, groups, *places = arguments
        self._values, self._positions, self._counts = (builder.extract_value(groups, i) for i in range(3))
        self._panel, self._panel_bytes, self._out, self._out_stride = places

    def tile(self, rows: int) -> None:
        builder, totals = self.builder, self.zeros(rows)
        with cgutils.for_range(builder, self._num_groups) as group:
            values = builder.add(self.number(self._values, group.index), self._panel)
            later = builder.add(group.index, I64(self.kind.groups_ahead))
            ahead = builder.add(self.number(self._values, later), self._panel)
            weights = builder.add(self._weights, self.number(self._positions, group.index))
            with cgutils.for_range(builder, self.number(self._counts, group.index)) as loop:
                first = builder.add(values, self.numbers_from(loop.index))
                here = [self.nth(first, self._panel_bytes, p) for p in range(self.panels)]
                self._fetch_lines(ahead, loop.index)
                self.step(totals, self.nth(weights, I64(4), loop.index), self._stride, here)
        places = [builder.add(self._out, I64(4 * GROUP * p)) for p in range(self.panels)]
        self.store_sums(totals, places, self._out_stride)

    def _fetch_lines(self, ahead, position) -> None:
        """Prefetch as many cache lines as the values of a position take."""
        lines = -(-self.panels * GROUP * self.kind.element_bytes // LINE_BYTES)
        first = self.nth(ahead, I64(lines * LINE_BYTES), position)
        for line in range(lines):
            self.fetch(self.builder.add(first, I64(line * LINE_BYTES)))


_AT, _THREE = types.intp, types.UniTuple(types.intp, 3)


@intrinsic
def score(typing, kind, num_rows, queries, stride, size, groups, head, ahead, scores, scores_stride):
    """Compute for rows r and the kind's number of groups g: scores[r] at g's position = Σ_d queries[r, d] ·
    keys[g, d].

    queries: float32 rows, `stride` bytes apart. size: d. groups: the addresses of three int64 arrays, with the
    address of each group's keys, its first position (times 4, in bytes), and the address of the scales of int8
    keys. head: is added to the first and the last of them. ahead: the distance from keys to those that are needed
    next, which are prefetched.
    """

    def generate(context, builder, signature, arguments):
        _, num_rows, *others = arguments
        _Scores(builder, signature.args[0].kind, others).tile_for(num_rows)
        return context.get_dummy_value()

    return types.void(kind, _AT, _AT, _AT, _AT, _THREE, _AT, _AT, _AT, _AT), generate


@intrinsic
def sum_values(
    typing, kind, panels, num_rows, weights, stride, num_groups, groups, panel, panel_bytes, out, out_stride
):
    """Compute for rows r and the features f of some panels: out[r, f] = Σ_p weights[r, p] · values[p, f].

    panels: 1, or the kind's number. weights: float32 rows, `stride` bytes apart. groups: the addresses of three
    int64 arrays, with the address of each group's values (and, after the last group, of what is needed next), its
    first position (times 4, in bytes), and its number of positions. panel: is added to the first of them.
    panel_bytes: from one panel to the next.
    """

    def generate(context, builder, signature, arguments):
        kind, (_, panels, num_rows, *others) = signature.args[0].kind, arguments
        with builder.if_else(builder.icmp_signed("==", panels, I64(1))) as (one, several):
            with one:
                _WeightedSums(builder, kind, 1, others).tile_for(num_rows)
            with several:
                if kind.panels > 1:
                    _WeightedSums(builder, kind, kind.panels, others).tile_for(num_rows)
        return context.get_dummy_value()

    return types.void(kind, _AT, _AT, _AT, _AT, _AT, _THREE, _AT, _AT, _AT, _AT), generate
