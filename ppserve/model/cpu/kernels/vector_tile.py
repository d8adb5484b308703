"""The code of a tile whose sums stay in vector registers."""
# mypy: ignore-errors
# (LLVM values have no types that mypy could check)

from __future__ import annotations

from numba.core import cgutils

from ppserve.model.compiled.llvm import I8, I32, I64, vector
from ppserve.model.cpu.kernels.memory import LINE_BYTES
from ppserve.model.cpu.kernels.tile_code import PANEL, TileCode


class VectorTile(TileCode):
    """Each word of a row is broadcast and multiplied into one word of all the panels' outputs."""

    def tile(self, num_rows: int) -> None:
        builder, arguments = self.builder, self.arguments
        totals = [self._begin(self.nth(arguments.start, arguments.start_stride, r)) for r in range(num_rows)]
        panels, fetch = self.each_panel(arguments.weights), self.each_panel(arguments.fetch)
        with cgutils.for_range(builder, arguments.chunks) as chunk:
            chunk_at = builder.add(arguments.x, builder.mul(chunk.index, I64(num_rows * self.row_bytes)))
            with cgutils.for_range(builder, I64(PANEL // self.operation.unroll)) as group:
                first = builder.mul(group.index, I64(self.operation.unroll))
                x = builder.add(chunk_at, builder.mul(first, I64(4 * self.operation.steps)))
                word = builder.add(builder.mul(chunk.index, I64(PANEL)), first)
                weights = self._at(panels, word, I64(LINE_BYTES))
                self._words(totals, x, weights, self._at(fetch, word, arguments.fetch_step))
        for r, row in enumerate(totals):
            place = self.nth(arguments.y, arguments.y_stride, r)
            for column, total in zip(self.columns, row, strict=True):
                self.store(builder.load(total), place, self.column_bytes * column)
        self.finish(num_rows)

    def _begin(self, address):
        kind = vector(self.operation.sums, self.kind.lanes)
        values = [self.load(address, self.column_bytes * column, kind) for column in self.columns]
        return [cgutils.alloca_once_value(self.builder, value) for value in values]

    def _at(self, addresses, word, stride):
        offset = self.builder.mul(word, stride)
        return [self.builder.add(address, offset) for address in addresses]

    def _words(self, totals, x, panels, fetch) -> None:
        """A few words of every row."""
        builder, operation = self.builder, self.operation
        for word in range(self.operation.unroll):
            for panel, place in enumerate(fetch):
                self.fetch(place)
                fetch[panel] = builder.add(place, self.arguments.fetch_step)
            columns = [self._column(panels, word, column) for column in self.columns]
            for step in range(operation.steps):
                weights = [operation.weights(builder, column, step) for column in columns]
                for r, row_totals in enumerate(totals):
                    place = self.pointer(x, r * self.row_bytes + 4 * operation.steps * word, I8)
                    row = operation.row(builder, place, step)
                    for total, weight in zip(row_totals, weights, strict=True):
                        builder.store(operation.step(builder, builder.load(total), row, weight), total)

    def _column(self, panels, word: int, column: int):
        panel, part = divmod(column, self.columns_of_panel)
        return self.load(panels[panel], word * LINE_BYTES + part * self.column_bytes, vector(I32, self.kind.lanes))
