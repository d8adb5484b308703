"""The code of a tile whose weights have 4 bits, in groups of 32 inputs with a scale and a minimum for each output.

    y[r, n] = scale[r] · Σ over groups g of (d[n, g] · Σ x[r] · q[n] + m[n, g] · Σ x[r])

x: a row's int8 numbers, q: numbers from 0 to 15, so an output's weight is d · q + m. Sums within a group are exact
integers; over groups each output is one chain of float32 multiply-adds, in order. Nothing is unpacked to memory.
"""
# mypy: ignore-errors
# (LLVM values have no types that mypy could check)

from __future__ import annotations

from itertools import chain

from llvmlite import ir
from numba.core import cgutils

from ppserve.model.compiled.llvm import F32, I8, I32, I64, call, constant, splat, vector
from ppserve.model.cpu.kernels.memory import LINE_BYTES
from ppserve.model.cpu.kernels.tile_code import PANEL, TileCode


class GroupTile(TileCode):
    """Each group of a row is multiplied into those of several panels' outputs."""

    sums_in_memory = F32

    def tile(self, num_rows: int) -> None:
        builder, arguments = self.builder, self.arguments
        if num_rows > self.kind.by_panel:
            self._panels(num_rows, self.each_panel(arguments.weights), arguments.start, arguments.y)
        else:
            with cgutils.for_range(builder, I64(self.kind.panels)) as panel:
                weights = self.nth(arguments.weights, arguments.panel_bytes, panel.index)
                offset = builder.mul(panel.index, I64(4 * PANEL))
                start, y = builder.add(arguments.start, offset), builder.add(arguments.y, offset)
                self._panels(num_rows, [weights], start, y)
        self.finish(num_rows)

    def _panels(self, num_rows: int, panels, start, y) -> None:
        """The sums of some panels next to each other, from those at `start` to those at `y`."""
        builder, arguments, floats = self.builder, self.arguments, vector(F32, self.kind.lanes)
        columns = range(len(panels) * self.columns_of_panel)
        totals = [
            [
                cgutils.alloca_once_value(builder, self.load(place, self.column_bytes * column, floats))
                for column in columns
            ]
            for place in (self.nth(start, arguments.start_stride, r) for r in range(num_rows))
        ]
        with cgutils.for_range(builder, arguments.chunks) as chunk:
            x = builder.add(arguments.x, builder.mul(chunk.index, I64(num_rows * self.kind.row_bytes)))
            offset = builder.mul(chunk.index, I64(self.kind.chunk_bytes))
            self._group(totals, x, [builder.add(panel, offset) for panel in panels])
        for r, row in enumerate(totals):
            place = self.nth(y, arguments.y_stride, r)
            for column, total in zip(columns, row, strict=True):
                self.store(builder.load(total), place, self.column_bytes * column)

    def _group(self, totals, x, panels) -> None:
        """One group of every row."""
        builder, lanes = self.builder, self.kind.lanes
        floats, name = vector(F32, lanes), f"llvm.fma.v{lanes}f32"
        sums = self._group_sums(len(totals), len(totals[0]), x, panels)
        scales = [self._scale_and_minimum(panels, column) for column in range(len(totals[0]))]
        for r, (row_totals, row_sums) in enumerate(zip(totals, sums, strict=True)):
            x_sum = splat(builder, self.load(x, (r + 1) * self.kind.row_bytes - 4, F32), lanes)
            for total, group_sum, (scale, minimum) in zip(row_totals, row_sums, scales, strict=True):
                value = builder.sitofp(builder.load(group_sum), floats)
                value = call(builder, name, floats, value, scale, builder.load(total))
                builder.store(call(builder, name, floats, x_sum, minimum, value), total)

    def _group_sums(self, num_rows: int, num_columns: int, x, panels):
        """The integers of one group: for each row, of each column."""
        builder, operation = self.builder, self.operation
        zero = constant(I32, self.kind.lanes, 0)
        sums = [[cgutils.alloca_once(builder, zero.type) for _ in range(num_columns)] for _ in range(num_rows)]
        for place in chain.from_iterable(sums):
            builder.store(zero, place)
        with cgutils.for_range(builder, I64(operation.words // operation.unroll)) as loop:
            first = builder.mul(loop.index, I64(operation.unroll))
            x = builder.add(x, builder.mul(first, I64(4 * operation.steps)))
            panels = [builder.add(panel, builder.mul(first, I64(LINE_BYTES))) for panel in panels]
            for word in range(operation.unroll):
                words = [self._column(panels, word, column) for column in range(num_columns)]
                for step in range(operation.steps):
                    weights = [operation.weights(builder, column, step) for column in words]
                    for r, row_sums in enumerate(sums):
                        place = self.pointer(x, r * self.kind.row_bytes + 4 * operation.steps * word, I8)
                        row = operation.row(builder, place, step)
                        for total, weight in zip(row_sums, weights, strict=True):
                            builder.store(operation.step(builder, builder.load(total), row, weight), total)
        return sums

    def _column(self, panels, word: int, column: int):
        panel, part = divmod(column, self.columns_of_panel)
        place = word * LINE_BYTES + part * self.column_bytes
        return self.load(panels[panel], place, vector(I32, self.kind.lanes))

    def _scale_and_minimum(self, panels, column: int):
        builder, count = self.builder, self.kind.lanes
        both = self._column(panels, self.operation.words, column)
        lower = builder.and_(both, constant(I32, count, 0xFFFF))
        return self._from_float16(lower), self._from_float16(builder.lshr(both, constant(I32, count, 16)))

    def _from_float16(self, halves):
        """float16 numbers in int32 as float32; exact, also of those that are denormal. Finite numbers only."""
        builder, count = self.builder, self.kind.lanes
        size = builder.shl(builder.and_(halves, constant(I32, count, 0x7FFF)), constant(I32, count, 13))
        raised = ir.Constant(vector(F32, count), [2.0**112] * count)
        value = builder.bitcast(builder.fmul(builder.bitcast(size, vector(F32, count)), raised), halves.type)
        sign = builder.shl(builder.and_(halves, constant(I32, count, 0x8000)), constant(I32, count, 16))
        return builder.bitcast(builder.or_(value, sign), vector(F32, count))

    def _result(self, total, column: int, row_scale_at):
        floats = vector(F32, self.kind.lanes)
        row_scale = splat(self.builder, self.load(row_scale_at, 0, F32), self.kind.lanes)
        bias = self.load(self.arguments.bias, self.column_bytes * column, floats)
        return call(self.builder, f"llvm.fma.v{self.kind.lanes}f32", floats, total, row_scale, bias)
