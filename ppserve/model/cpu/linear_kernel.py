"""Matrix products in which every output is one chain of fused multiply-adds over the inputs, in order.

That fixes its bits whatever rows share the call. Weights lie in panels of 16 outputs, (N / 16, K, 16), so
that the innermost loop reads one whole vector per input and multiplies it into up to six rows, whose sums
stay in registers (the micro-kernel of BLIS: Van Zee and van de Geijn, 2015). While the rows of one panel
are computed, the next panel is prefetched: with few rows, as in decoding, this is what keeps the
arithmetic units from waiting for memory.

T rows, K inputs, N outputs.
"""
# mypy: ignore-errors
# (numba types these functions from their arguments; mypy cannot see through its intrinsics)

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ppserve.model.cpu.jit import inlined, kernel
from ppserve.model.cpu.vector import F32, LANES, emit_address, emit_fma, emit_load, emit_prefetch, emit_splat

_ROWS_AT_ONCE = 96
"""Rows whose inputs stay in the second-level cache while the panels pass by."""

_I64 = ir.IntType(64)


@intrinsic(prefer_literal=True)
def _multiply_tile(typing, rows, x, x_at, weights, panel_at, depth, bias, bias_at, y, y_at, stride, fetch, step):
    """For r < rows (a literal): 16 outputs of a row,

        y[y_at + r * stride :] = bias[bias_at :] + Σ_k x[x_at + r * depth + k] * weights[panel_at + 16 k :]

    On the way it prefetches weights[fetch + k * step]."""
    count = rows.literal_value

    def generate(context, builder, signature, arguments):
        _, x, x_at, weights, panel_at, depth, bias, bias_at, y, y_at, stride, fetch, step = arguments
        x_type, weights_type, bias_type, y_type = (signature.args[i] for i in (1, 3, 6, 8))

        def nth_row(start, stride, row):
            return builder.add(start, builder.mul(stride, _I64(row)))

        start = emit_load(context, builder, bias_type, bias, bias_at)
        sums = [cgutils.alloca_once_value(builder, start) for _ in range(count)]
        row_at = [nth_row(x_at, depth, r) for r in range(count)]
        with cgutils.for_range(builder, depth) as loop:
            wanted = builder.add(fetch, builder.mul(loop.index, step))
            emit_prefetch(builder, emit_address(context, builder, weights_type, weights, wanted, F32))
            weight_at = builder.add(panel_at, builder.shl(loop.index, _I64(4)))
            column = emit_load(context, builder, weights_type, weights, weight_at)
            for r in range(count):
                place = emit_address(context, builder, x_type, x, builder.add(row_at[r], loop.index), F32)
                value = emit_splat(builder, builder.load(place))
                builder.store(emit_fma(builder, value, column, builder.load(sums[r])), sums[r])
        for r in range(count):
            place = emit_address(context, builder, y_type, y, nth_row(y_at, stride, r), LANES)
            builder.store(builder.load(sums[r]), place, align=4)
        return context.get_dummy_value()

    at = types.intp
    return types.void(rows, x, at, weights, at, at, bias, at, y, at, at, at, at), generate


@inlined
def _multiply_panel(x, first_row, end_row, depth, weights, panel, fetch_at, bias, y, y_at, y_stride):
    """All rows of one panel, six at a time; 7 and 8 rows left are done as 4 and the rest."""
    step = -(-16 * 6 // max(end_row - first_row, 6))
    panel_at, bias_at = panel * depth * 16, panel * 16
    row = first_row
    while row < end_row:
        left = end_row - row
        x_at, to = row * depth, y_at + (row - first_row) * y_stride
        fetch = fetch_at + (row - first_row) // 6 * step * depth
        if left == 6 or left > 8:
            _multiply_tile(6, x, x_at, weights, panel_at, depth, bias, bias_at, y, to, y_stride, fetch, step)
            row += 6
        elif left == 5:
            _multiply_tile(5, x, x_at, weights, panel_at, depth, bias, bias_at, y, to, y_stride, fetch, step)
            row += 5
        elif left >= 4:
            _multiply_tile(4, x, x_at, weights, panel_at, depth, bias, bias_at, y, to, y_stride, fetch, step)
            row += 4
        elif left == 3:
            _multiply_tile(3, x, x_at, weights, panel_at, depth, bias, bias_at, y, to, y_stride, fetch, step)
            row += 3
        elif left == 2:
            _multiply_tile(2, x, x_at, weights, panel_at, depth, bias, bias_at, y, to, y_stride, fetch, step)
            row += 2
        else:
            _multiply_tile(1, x, x_at, weights, panel_at, depth, bias, bias_at, y, to, y_stride, fetch, step)
            row += 1


@kernel
def multiply(x_TK, weights, bias, y_TN, first_panel, end_panel) -> None:
    """y = x Wᵀ + bias for the outputs of panels first_panel .. end_panel. weights: flat panels, float32 or
    bfloat16 as uint16; bias: N rounded up to whole panels."""
    num_rows, depth = x_TK.shape
    num_outputs = y_TN.shape[1]
    x, y = x_TK.reshape(-1), y_TN.reshape(-1)
    last_panel = len(bias) // 16 - 1
    edge = np.empty(_ROWS_AT_ONCE * 16, np.float32)
    for first_row in range(0, num_rows, _ROWS_AT_ONCE):
        end_row = min(num_rows, first_row + _ROWS_AT_ONCE)
        for panel in range(first_panel, end_panel):
            fetch_at = min(panel + 1, last_panel) * depth * 16
            valid = min(16, num_outputs - panel * 16)
            if valid == 16:
                y_at = first_row * num_outputs + panel * 16
                _multiply_panel(
                    x, first_row, end_row, depth, weights, panel, fetch_at, bias, y, y_at, num_outputs
                )  # fmt: skip
            else:
                _multiply_panel(x, first_row, end_row, depth, weights, panel, fetch_at, bias, edge, 0, 16)
                for row in range(first_row, end_row):
                    for n in range(valid):
                        y_TN[row, panel * 16 + n] = edge[(row - first_row) * 16 + n]
