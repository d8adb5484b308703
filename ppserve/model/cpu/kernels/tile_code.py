"""What the code of all tiles shares: their shape, arguments and addresses, and how a sum becomes a result."""
# mypy: ignore-errors
# (LLVM values have no types that mypy could check)

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from llvmlite import ir
from numba.core import cgutils

from ppserve.model.compiled.llvm import F32, I8, I32, I64, call, splat, vector
from ppserve.model.compiled.settings import setting
from ppserve.model.cpu.kernels.memory import LINE_BYTES
from ppserve.model.cpu.kernels.operations import OPERATIONS

PANEL = 16
"""How many outputs a panel has, and how many words a chunk has."""

CHUNK_BYTES = PANEL * LINE_BYTES
"""The size of 16 words of 16 rows."""


@setting
@dataclass(frozen=True)
class MicroKernel:
    """The shape of a micro-kernel.

    operation: a key of OPERATIONS. lanes: elements of a vector register, 8 or 16. panels: how many a tile has.
    rows: the numbers of rows that a tile may have, ascending. rows_at_once, chunks_at_once: the size of a block of
    rows, which is to stay in the second-level cache while the weights are read. reads_alone: whether a product of
    one tile leaves prefetching to the CPU, and with few rows reads one panel after the other. That is faster on
    AMD's CPUs and slower on Intel's (docs/performance.md).
    """

    operation: str
    lanes: int
    panels: int
    rows: tuple[int, ...]
    rows_at_once: int = 192
    chunks_at_once: int = 64
    reads_alone: bool = False

    def tile_rows(self, num_rows: int) -> int:
        """Return the rows of a tile. As few tiles as possible hold `num_rows` rows, about equally many in each."""
        num_tiles = -(-num_rows // self.rows[-1])
        return min(size for size in self.rows if size * num_tiles >= num_rows)

    @property
    def chunk_inputs(self) -> int:
        """The number of inputs in a chunk."""
        return OPERATIONS[self.operation].words * OPERATIONS[self.operation].inputs

    @property
    def chunk_bytes(self) -> int:
        """The bytes that the weights of 16 outputs take in a chunk."""
        return self.chunk_lines * LINE_BYTES

    @property
    def chunk_lines(self) -> int:
        """The cache lines that the weights of 16 outputs take in a chunk."""
        return OPERATIONS[self.operation].words + OPERATIONS[self.operation].tail_lines

    @property
    def row_bytes(self) -> int:
        """The bytes that a row takes in a chunk."""
        operation = OPERATIONS[self.operation]
        return 4 * operation.words * operation.steps + operation.row_tail_bytes

    @property
    def is_integer(self) -> bool:
        """Whether rows are rounded to int8, each with a scale."""
        return OPERATIONS[self.operation].inputs >= 4

    @property
    def has_groups(self) -> bool:
        """Whether each chunk of a row comes with the sum of its values."""
        return OPERATIONS[self.operation].row_tail_bytes > 0


class TileArguments(NamedTuple):
    """The arguments of `multiply_tile`, as LLVM values."""

    tile_rows: ir.Value
    x: ir.Value
    weights: ir.Value
    panel_bytes: ir.Value
    chunks: ir.Value
    start: ir.Value
    start_stride: ir.Value
    y: ir.Value
    y_stride: ir.Value
    bias: ir.Value
    output_scales: ir.Value
    row_scales: ir.Value
    fetch: ir.Value
    fetch_step: ir.Value


class Code:
    """Emits loads and stores at addresses."""

    def __init__(self, builder) -> None:
        self.builder = builder

    def nth(self, address, stride, number):
        """Return the address of element `number`. stride: from element to element. number: an int, or an LLVM
        value."""
        number = I64(number) if isinstance(number, int) else number
        return self.builder.add(address, self.builder.mul(stride, number))

    def pointer(self, address, offset: int, kind: ir.Type):
        place = self.builder.gep(self.builder.inttoptr(address, I8.as_pointer()), [I64(offset)])
        return self.builder.bitcast(place, kind.as_pointer())

    def load(self, address, offset: int, kind: ir.Type):
        return self.builder.load(self.pointer(address, offset, kind), align=4)

    def store(self, value, address, offset: int) -> None:
        self.builder.store(value, self.pointer(address, offset, value.type), align=4)

    def fetch(self, address) -> None:
        """Emit a prefetch of the cache line at an address."""
        place = self.pointer(address, 0, I8)
        call(self.builder, "llvm.prefetch.p0i8", ir.VoidType(), place, I32(0), I32(3), I32(1))


class VectorTile(Code):
    """Emits the code of one micro-kernel's tiles. Each word of a row is broadcast and multiplied into one word of
    the outputs of several panels. Columns are the vector registers side by side in a row of sums.
    """

    def __init__(self, builder, kind: MicroKernel, arguments: TileArguments) -> None:
        super().__init__(builder)
        self.kind, self.arguments = kind, arguments
        self.operation = OPERATIONS[kind.operation](kind.lanes)
        self.column_bytes = 4 * kind.lanes
        self.columns_of_panel = PANEL // kind.lanes
        self.columns = range(kind.panels * self.columns_of_panel)

    @property
    def sums_in_memory(self) -> ir.Type:
        return self.operation.sums

    def tile(self, num_rows: int) -> None:
        """Emit the code of a tile of so many rows."""
        builder, arguments = self.builder, self.arguments
        if self.kind.reads_alone and 2 * num_rows <= self.kind.rows[-1]:
            with cgutils.for_range(builder, I64(self.kind.panels)) as panel:
                weights = self.nth(arguments.weights, arguments.panel_bytes, panel.index)
                offset = builder.mul(panel.index, I64(4 * PANEL))
                start, y = builder.add(arguments.start, offset), builder.add(arguments.y, offset)
                self._panels(num_rows, [weights], [], start, y)
        else:
            panels, fetch = self.each_panel(arguments.weights), self.each_panel(arguments.fetch)
            self._panels(num_rows, panels, fetch, arguments.start, arguments.y)
        self.finish(num_rows)

    def each_panel(self, address):
        return [self.nth(address, self.arguments.panel_bytes, panel) for panel in range(self.kind.panels)]

    def finish(self, num_rows: int) -> None:
        """Emit the code that turns the sums in memory into results, in place, once they are complete."""
        builder, arguments = self.builder, self.arguments
        sums = vector(self.sums_in_memory, self.kind.lanes)
        with builder.if_then(builder.icmp_signed("!=", arguments.bias, I64(0))):
            with cgutils.for_range(builder, I64(num_rows)) as row:
                place = builder.add(arguments.y, builder.mul(row.index, arguments.y_stride))
                scale_at = builder.add(arguments.row_scales, builder.mul(row.index, I64(4)))
                for column in self.columns:
                    total = self.load(place, self.column_bytes * column, sums)
                    self.store(self._result(total, column, scale_at), place, self.column_bytes * column)

    def _result(self, total, column: int, row_scale_at):
        """Return the result of a complete sum. An integer is multiplied by both scales. Then the bias is added."""
        builder, floats = self.builder, vector(F32, self.kind.lanes)
        bias = self.load(self.arguments.bias, self.column_bytes * column, floats)
        if self.sums_in_memory == F32:
            return builder.fadd(total, bias)
        row_scale = splat(builder, self.load(row_scale_at, 0, F32), self.kind.lanes)
        output_scale = self.load(self.arguments.output_scales, self.column_bytes * column, floats)
        scale = builder.fmul(row_scale, output_scale)
        value = builder.sitofp(total, floats)
        return call(builder, f"llvm.fma.v{self.kind.lanes}f32", floats, value, scale, bias)

    def _panels(self, num_rows: int, panels, fetch, start, y) -> None:
        """Emit the code that adds the products of some panels, side by side, to the sums at `start`, and stores
        them at `y`. fetch: what is prefetched meanwhile."""
        builder, arguments = self.builder, self.arguments
        columns = range(len(panels) * self.columns_of_panel)
        totals = [self._begin(self.nth(start, arguments.start_stride, r), columns) for r in range(num_rows)]
        with cgutils.for_range(builder, arguments.chunks) as chunk:
            x = self.nth(arguments.x, I64(num_rows * self.kind.row_bytes), chunk.index)
            line = builder.mul(chunk.index, I64(self.kind.chunk_lines))
            weights = self._at(panels, line, I64(LINE_BYTES))
            self._chunk(totals, x, weights, self._at(fetch, line, arguments.fetch_step))
        for r, row in enumerate(totals):
            place = self.nth(y, arguments.y_stride, r)
            for column, total in zip(columns, row, strict=True):
                self.store(builder.load(total), place, self.column_bytes * column)

    def _begin(self, address, columns):
        kind = vector(self.sums_in_memory, self.kind.lanes)
        values = [self.load(address, self.column_bytes * column, kind) for column in columns]
        return [cgutils.alloca_once_value(self.builder, value) for value in values]

    def _at(self, addresses, line, stride):
        return [self.nth(address, stride, line) for address in addresses]

    def _chunk(self, totals, x, panels, fetch) -> None:
        """Emit one chunk of every row."""
        builder, operation = self.builder, self.operation
        with cgutils.for_range(builder, I64(operation.words // operation.unroll)) as group:
            first = builder.mul(group.index, I64(operation.unroll))
            row, weights = self.nth(x, I64(4 * operation.steps), first), self._at(panels, first, I64(LINE_BYTES))
            self._words(totals, row, weights, self._at(fetch, first, self.arguments.fetch_step))

    def _words(self, totals, x, panels, fetch) -> None:
        """Emit a few words of every row."""
        builder, operation = self.builder, self.operation
        for word in range(self.operation.unroll):
            for panel, place in enumerate(fetch):
                self.fetch(place)
                fetch[panel] = builder.add(place, self.arguments.fetch_step)
            columns = [self._column(panels, word, c) for c in range(len(panels) * self.columns_of_panel)]
            for step in range(operation.steps):
                weights = [operation.weights(builder, column, step) for column in columns]
                for r, row_totals in enumerate(totals):
                    place = self.pointer(x, r * self.kind.row_bytes + 4 * operation.steps * word, I8)
                    row = operation.row(builder, place, step)
                    for total, weight in zip(row_totals, weights, strict=True):
                        builder.store(operation.step(builder, builder.load(total), row, weight), total)

    def _column(self, panels, word: int, column: int):
        panel, part = divmod(column, self.columns_of_panel)
        return self.load(panels[panel], word * LINE_BYTES + part * self.column_bytes, vector(I32, self.kind.lanes))
