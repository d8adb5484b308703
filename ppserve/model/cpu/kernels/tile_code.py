"""What the code of every tile shares: its shape, its arguments, addresses, and how a sum becomes a result."""
# mypy: ignore-errors
# (LLVM values have no types that mypy could check)

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from llvmlite import ir
from numba.core import cgutils

from ppserve.model.compiled.llvm import F32, I8, I32, I64, call, splat, vector
from ppserve.model.cpu.kernels.kinds import setting
from ppserve.model.cpu.kernels.memory import LINE_BYTES
from ppserve.model.cpu.kernels.operations import OPERATIONS

PANEL = 16
"""Outputs of a panel, and words of a chunk."""

CHUNK_BYTES = PANEL * LINE_BYTES
"""16 words of 16 outputs, or of 16 rows."""


@setting
@dataclass(frozen=True)
class MicroKernel:
    """operation: a key of OPERATIONS. lanes: elements of a vector register, 8 or 16. panels: those of a tile.
    rows: the numbers of rows that a tile may have, ascending. rows_at_once, chunks_at_once: the block of rows that
    is to stay in the second-level cache while the weights pass by. by_panel: tiles of up to so many rows pass
    over one panel after the other and fetch nothing ahead, because a CPU reads one stream of memory fastest by
    itself; at most half of the most rows, so that no product has several such tiles. fetches_alone: whether a
    larger tile fetches where it is a product's only one."""

    operation: str
    lanes: int
    panels: int
    rows: tuple[int, ...]
    rows_at_once: int = 192
    chunks_at_once: int = 64
    by_panel: int = 0
    fetches_alone: bool = True

    @property
    def steps(self) -> int:
        return OPERATIONS[self.operation].steps

    def padded_rows(self, num_rows: int) -> int:
        """Those of the tiles that hold `num_rows`."""
        num_tiles = -(-num_rows // self.rows[-1])
        return num_tiles * min(size for size in self.rows if size * num_tiles >= num_rows)

    @property
    def inputs(self) -> int:
        """Inputs in a word."""
        return OPERATIONS[self.operation].inputs


class TileArguments(NamedTuple):
    """Those of `multiply_tile`, as LLVM values."""

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


class TileCode(ABC):
    """Emits the code of one micro-kernel's tiles. Columns: the vector registers beside each other in a row of
    sums.
    """

    def __init__(self, builder, kind: MicroKernel, arguments: TileArguments) -> None:
        self.builder, self.kind, self.arguments = builder, kind, arguments
        self.operation = OPERATIONS[kind.operation](kind.lanes)
        self.column_bytes = 4 * kind.lanes
        self.columns_of_panel = PANEL // kind.lanes
        self.columns = range(kind.panels * self.columns_of_panel)

    @abstractmethod
    def tile(self, num_rows: int) -> None:
        """The code of a tile of so many rows, where the builder stands."""

    def nth(self, address, stride, number):
        """number: of Python, or an LLVM value."""
        number = I64(number) if isinstance(number, int) else number
        return self.builder.add(address, self.builder.mul(stride, number))

    def each_panel(self, address):
        return [self.nth(address, self.arguments.panel_bytes, panel) for panel in range(self.kind.panels)]

    def pointer(self, address, offset: int, kind: ir.Type):
        place = self.builder.gep(self.builder.inttoptr(address, I8.as_pointer()), [I64(offset)])
        return self.builder.bitcast(place, kind.as_pointer())

    def load(self, address, offset: int, kind: ir.Type):
        return self.builder.load(self.pointer(address, offset, kind), align=4)

    def store(self, value, address, offset: int) -> None:
        self.builder.store(value, self.pointer(address, offset, value.type), align=4)

    def fetch(self, address) -> None:
        """Ask for the cache line at an address."""
        place = self.pointer(address, 0, I8)
        call(self.builder, "llvm.prefetch.p0i8", ir.VoidType(), place, I32(0), I32(3), I32(1))

    def finish(self, num_rows: int) -> None:
        """Once the sums in memory are complete: make them results, where they are."""
        builder, arguments = self.builder, self.arguments
        sums = vector(self.operation.sums, self.kind.lanes)
        with builder.if_then(builder.icmp_signed("!=", arguments.bias, I64(0))):
            with cgutils.for_range(builder, I64(num_rows)) as row:
                place = builder.add(arguments.y, builder.mul(row.index, arguments.y_stride))
                scale_at = builder.add(arguments.row_scales, builder.mul(row.index, I64(4)))
                for column in self.columns:
                    total = self.load(place, self.column_bytes * column, sums)
                    self.store(self._result(total, column, scale_at), place, self.column_bytes * column)

    def _result(self, total, column: int, row_scale_at):
        """A result from a complete sum: an integer is multiplied by both scales; then the bias is added."""
        builder, floats = self.builder, vector(F32, self.kind.lanes)
        bias = self.load(self.arguments.bias, self.column_bytes * column, floats)
        if self.operation.sums == F32:
            return builder.fadd(total, bias)
        row_scale = splat(builder, self.load(row_scale_at, 0, F32), self.kind.lanes)
        output_scale = self.load(self.arguments.output_scales, self.column_bytes * column, floats)
        scale = builder.fmul(row_scale, output_scale)
        value = builder.sitofp(total, floats)
        return call(builder, f"llvm.fma.v{self.kind.lanes}f32", floats, value, scale, bias)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in one chunk."""
        return LINE_BYTES * self.operation.steps
