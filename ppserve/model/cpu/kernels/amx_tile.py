"""The code of a tile whose sums stay in AMX's eight tile registers, each of 16 rows of 64 bytes.

A tile has 16 or 32 rows and 2 panels. Registers 0 to 3 hold sums, 4 and 5 rows, 6 and 7 weights. A chunk of rows
or of weights lies in memory just as a register holds it, so loading rearranges nothing. Up to 4 rows are
multiplied in vector registers instead, with the same sums in the same order: memory is then read 1.1 times as
fast.
"""
# mypy: ignore-errors
# (LLVM values have no types that mypy could check)

from __future__ import annotations

from itertools import chain

from llvmlite import ir
from numba.core import cgutils

from ppserve.model.compiled.llvm import F32, I8, I64, call, shuffle, vector
from ppserve.model.cpu.kernels.memory import LINE_BYTES
from ppserve.model.cpu.kernels.tile_code import CHUNK_BYTES, PANEL, VectorTile

_ROWS, _WEIGHTS = (4, 5), (6, 7)

# Palette 1; from byte 16 on, the bytes of a row of each register (16 bits each); from byte 48 on, its number of
# rows.
_CONFIGURATION = bytes([1] + [0] * 15 + [LINE_BYTES, 0] * 8 + [0] * 16 + [PANEL] * 8 + [0] * 8)


class TileUnit:
    """Emits AMX's instructions, of which register numbers are a part. Addresses and strides are in bytes."""

    def __init__(self, builder) -> None:
        self.builder = builder

    def configure(self) -> None:
        """Emit what gives the eight registers their shape. Until `release`, a thread's state is 8 KiB larger."""
        constant = ir.Constant(ir.ArrayType(I8, len(_CONFIGURATION)), bytearray(_CONFIGURATION))
        place = cgutils.alloca_once_value(self.builder, constant)
        self._call("ldtilecfg", self.builder.bitcast(place, I8.as_pointer()))

    def release(self) -> None:
        self._call("tilerelease")

    def load(self, register: int, address, stride) -> None:
        self._call("tileloadd64", I8(register), self._pointer(address), stride)

    def store(self, register: int, address, stride) -> None:
        self._call("tilestored64", I8(register), self._pointer(address), stride)

    def multiply(self, instruction: str, sums: int, rows: int, weights: int) -> None:
        self._call(instruction, I8(sums), I8(rows), I8(weights))

    def _pointer(self, address):
        return self.builder.inttoptr(address, I8.as_pointer())

    def _call(self, name: str, *arguments) -> None:
        call(self.builder, f"llvm.x86.{name}", ir.VoidType(), *arguments)


class AmxTile(VectorTile):
    """A tile in which each chunk of 16 rows is multiplied by one chunk of each panel."""

    unit = TileUnit

    def tile(self, num_rows: int) -> None:
        if num_rows < PANEL:
            super().tile(num_rows)
            return
        builder, arguments, unit = self.builder, self.arguments, self.unit(self.builder)
        row_tiles = range(num_rows // PANEL)
        self._move(unit.load, row_tiles, arguments.start, arguments.start_stride)
        panels, fetch = self.each_panel(arguments.weights), self.each_panel(arguments.fetch)
        with cgutils.for_range(builder, arguments.chunks) as chunk:
            wanted = self._lines(fetch, chunk.index)
            x = builder.add(arguments.x, builder.mul(chunk.index, I64(num_rows * self.kind.row_bytes)))
            for panel, address in enumerate(panels):
                place = builder.add(address, builder.mul(chunk.index, I64(CHUNK_BYTES)))
                unit.load(_WEIGHTS[panel], place, I64(LINE_BYTES))
            for tile in row_tiles:
                unit.load(_ROWS[tile], builder.add(x, I64(tile * CHUNK_BYTES)), I64(LINE_BYTES))
                for panel in range(self.kind.panels):
                    sums = tile * self.kind.panels + panel
                    for place in wanted[sums :: self.kind.panels * len(row_tiles)]:
                        self.fetch(place)
                    unit.multiply(self.operation.instruction, sums, _ROWS[tile], _WEIGHTS[panel])
        self._move(unit.store, row_tiles, arguments.y, arguments.y_stride)
        self.finish(num_rows)

    def _move(self, move, row_tiles: range, address, stride) -> None:
        """Emit `move`, a load or a store, for all sums."""
        for tile in row_tiles:
            rows = self.nth(address, stride, tile * PANEL)
            for panel in range(self.kind.panels):
                move(tile * self.kind.panels + panel, self.builder.add(rows, I64(panel * LINE_BYTES)), stride)

    def _lines(self, fetch, chunk):
        """Return the addresses of all cache lines that are fetched during a chunk."""
        builder, step, places = self.builder, self.arguments.fetch_step, []
        for address in fetch:
            place = builder.add(address, builder.mul(builder.mul(chunk, I64(PANEL)), step))
            for _ in range(PANEL):
                places.append(place)
                place = builder.add(place, step)
        return places


class BFloat16Tile(AmxTile):
    """A tile of bfloat16 pairs, which AMX adds in an order of its own."""

    def _chunk(self, totals, x, panels, fetch) -> None:
        """Emit a chunk of few rows in vector registers, with sums in the order of `tdpbf16ps`."""
        builder, lanes = self.builder, self.kind.lanes
        zero = ir.Constant(vector(F32, 2 * lanes), [0.0] * 2 * lanes)
        pairs = [[cgutils.alloca_once_value(builder, zero) for _ in row] for row in totals]
        super()._chunk(pairs, x, panels, fetch)
        for total, pair in zip(chain(*totals), chain(*pairs), strict=True):
            first, second = (shuffle(builder, builder.load(pair), [*range(i, i + lanes)]) for i in (0, lanes))
            builder.store(builder.fadd(builder.load(total), builder.fadd(first, second)), total)
