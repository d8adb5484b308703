"""The code of a tile whose weights have 4 bits, in groups of 32 inputs with a scale and a minimum for each output.

    y[r, n] = Σ over groups g of (d[n, g] · s[r, g] · Σ x[r] · q[n] + m[n, g] · (s[r, g] · Σ x[r]))

A row's inputs are s · x, where x are int8 numbers. Weights are d · q + m, where q are numbers from 0 to 15. Sums
within a group are exact integers. Over the groups, each output is one chain of float32 multiply-adds, in order.
"""
# mypy: ignore-errors
# (LLVM values have no types that mypy could check)

from __future__ import annotations

from functools import partial

from llvmlite import ir
from numba.core import cgutils

from ppserve.model.compiled.llvm import F32, I32, call, constant, splat, vector
from ppserve.model.cpu.kernels.tile_code import VectorTile


class GroupTile(VectorTile):
    """A tile in which each group of a row is multiplied by the same group of several panels' outputs."""

    sums_in_memory = F32

    def _chunk(self, totals, x, panels, fetch) -> None:
        builder, lanes, floats = self.builder, self.kind.lanes, vector(F32, self.kind.lanes)
        zero, fma = constant(I32, lanes, 0), partial(call, builder, f"llvm.fma.v{lanes}f32", floats)
        sums = [[cgutils.alloca_once_value(builder, zero) for _ in row] for row in totals]
        super()._chunk(sums, x, panels, fetch)
        for place in self._at(fetch, self.operation.words, self.arguments.fetch_step):
            self.fetch(place)
        scales = [self._scale_and_minimum(panels, column) for column in range(len(totals[0]))]
        for r, (row_totals, row_sums) in enumerate(zip(totals, sums, strict=True)):
            end = (r + 1) * self.kind.row_bytes
            x_scale, x_sum = (splat(builder, self.load(x, end - before, F32), lanes) for before in (8, 4))
            for total, group_sum, (scale, minimum) in zip(row_totals, row_sums, scales, strict=True):
                factor = builder.fmul(x_scale, scale)
                value = fma(builder.sitofp(builder.load(group_sum), floats), factor, builder.load(total))
                builder.store(fma(x_sum, minimum, value), total)

    def _scale_and_minimum(self, panels, column: int):
        builder, count = self.builder, self.kind.lanes
        both = self._column(panels, self.operation.words, column)
        lower = builder.and_(both, constant(I32, count, 0xFFFF))
        return self._from_float16(lower), self._from_float16(builder.lshr(both, constant(I32, count, 16)))

    def _from_float16(self, halves):
        """Convert finite float16 numbers, given in int32, to float32. It is exact, also for denormal numbers."""
        builder, count = self.builder, self.kind.lanes
        size = builder.shl(builder.and_(halves, constant(I32, count, 0x7FFF)), constant(I32, count, 13))
        raised = ir.Constant(vector(F32, count), [2.0**112] * count)
        value = builder.bitcast(builder.fmul(builder.bitcast(size, vector(F32, count)), raised), halves.type)
        sign = builder.shl(builder.and_(halves, constant(I32, count, 0x8000)), constant(I32, count, 16))
        return builder.bitcast(builder.or_(value, sign), vector(F32, count))
