"""The code of a tile whose sums stay in vector registers."""
# mypy: ignore-errors
# (LLVM values have no types that mypy could check)

from __future__ import annotations

from numba.core import cgutils

from ppserve.model.compiled.llvm import I8, I32, I64, vector
from ppserve.model.cpu.kernels.memory import LINE_BYTES
from ppserve.model.cpu.kernels.tile_code import PANEL, TileCode


class VectorTile(TileCode):
    """Each word of a row is broadcast and multiplied into one word of several panels' outputs."""

    def tile(self, num_rows: int) -> None:
        builder, arguments = self.builder, self.arguments
        if num_rows > self.kind.by_panel:
            panels, fetch = self.each_panel(arguments.weights), self.each_panel(arguments.fetch)
            self._panels(num_rows, panels, fetch, arguments.start, arguments.y)
        else:
            with cgutils.for_range(builder, I64(self.kind.panels)) as panel:
                weights = self.nth(arguments.weights, arguments.panel_bytes, panel.index)
                offset = builder.mul(panel.index, I64(4 * PANEL))
                start, y = builder.add(arguments.start, offset), builder.add(arguments.y, offset)
                self._panels(num_rows, [weights], [], start, y)
        self.finish(num_rows)

    def _panels(self, num_rows: int, panels, fetch, start, y) -> None:
        """The sums of some panels next to each other, from those at `start` to those at `y`. fetch: what is asked
        for meanwhile."""
        builder, arguments = self.builder, self.arguments
        columns = range(len(panels) * self.columns_of_panel)
        totals = [self._begin(self.nth(start, arguments.start_stride, r), columns) for r in range(num_rows)]
        with cgutils.for_range(builder, arguments.chunks) as chunk:
            chunk_at = builder.add(arguments.x, builder.mul(chunk.index, I64(num_rows * self.row_bytes)))
            with cgutils.for_range(builder, I64(PANEL // self.operation.unroll)) as group:
                first = builder.mul(group.index, I64(self.operation.unroll))
                x = builder.add(chunk_at, builder.mul(first, I64(4 * self.operation.steps)))
                word = builder.add(builder.mul(chunk.index, I64(PANEL)), first)
                weights = self._at(panels, word, I64(LINE_BYTES))
                self._words(totals, x, weights, self._at(fetch, word, arguments.fetch_step))
        for r, row in enumerate(totals):
            place = self.nth(y, arguments.y_stride, r)
            for column, total in zip(columns, row, strict=True):
                self.store(builder.load(total), place, self.column_bytes * column)

    def _begin(self, address, columns):
        kind = vector(self.operation.sums, self.kind.lanes)
        values = [self.load(address, self.column_bytes * column, kind) for column in columns]
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
            columns = [self._column(panels, word, c) for c in range(len(panels) * self.columns_of_panel)]
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
