"""The innermost part of a product: a few rows times a few panels of weights, their sums kept in registers.

Everything is seen as words of 32 bits: one float32, two bfloat16 or four int8 values, consecutive inputs of one
row or one output. A word of a row is multiplied into the words of 16 outputs at once, and each output is one chain
of such steps over its words, in order. So its bits depend on its own inputs alone: not on the rows beside it, the
size of the tile, the threads or where the work was cut. (The micro-kernel of BLIS: Van Zee and van de Geijn,
2015.)

    weights  (N / 16, W, 16) words: panels of 16 outputs; N padded with zeros to a multiple of 64, W to one of 16
    rows     tiles of R rows, each (W / 16, R, 16) words: 16 words of one row, then of the next
    sums     (T, N) float32 or int32, row after row, with memory for whole tiles

T rows, N outputs, W words of a row. Addresses and strides are in bytes.
"""
# mypy: ignore-errors
# (numba types these functions from their arguments; mypy cannot see through its intrinsics)

from __future__ import annotations

from numba import types
from numba.extending import intrinsic, overload_method

from ppserve.model.compiled.lanes import lanes
from ppserve.model.compiled.llvm import I64
from ppserve.model.cpu.kernels.amx_tile import AmxTile
from ppserve.model.cpu.kernels.kinds import KindType
from ppserve.model.cpu.kernels.operations import OPERATIONS
from ppserve.model.cpu.kernels.tile_code import TileArguments
from ppserve.model.cpu.kernels.vector_tile import VectorTile

TILE_CODES = dict.fromkeys(OPERATIONS, VectorTile) | {"bf16_tiles": AmxTile, "int8_tiles": AmxTile}


@overload_method(KindType, "tile_rows")
def _tile_rows(kind, num_rows):
    """Rows of each of the fewest tiles that hold `num_rows`, about equally many in each."""
    sizes = kind.kind.rows

    def tile_rows(kind, num_rows):
        num_tiles = -(-num_rows // sizes[-1])
        needed = -(-num_rows // num_tiles)
        for size in sizes:
            if size >= needed:
                return size
        return needed

    return tile_rows


@intrinsic
def pack(typing, kind, place, values):
    """Write 16 consecutive inputs of a row at an address, as `Operation.packed` has them."""

    def generate(context, builder, signature, arguments):
        _, place, values = arguments
        packed = OPERATIONS[signature.args[0].kind.operation].packed(builder, values)
        builder.store(packed, builder.inttoptr(place, packed.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(kind, types.intp, lanes), generate


@intrinsic
def configure(typing, kind):
    """Makes the registers of a micro-kernel ready on this thread, before its first tile."""

    def generate(context, builder, signature, arguments):
        code = TILE_CODES[signature.args[0].kind.operation]
        if issubclass(code, AmxTile):
            code.unit(builder).configure()
        return context.get_dummy_value()

    return types.void(kind), generate


@intrinsic
def release(typing, kind):
    """The counterpart of `configure`, after the last tile."""

    def generate(context, builder, signature, arguments):
        code = TILE_CODES[signature.args[0].kind.operation]
        if issubclass(code, AmxTile):
            code.unit(builder).release()
        return context.get_dummy_value()

    return types.void(kind), generate


@intrinsic
def multiply_tile(
    typing, kind, tile_rows, x, weights, panel_bytes, chunks, start, start_stride, y, y_stride, bias,
    output_scales, row_scales, fetch, fetch_step,
):  # fmt: skip
    """For the rows r of a tile and the outputs n of its panels, one panel after the other:

        y[r, n] = start[r, n] + Σ over 16 * chunks words of x[r] · weights[n]

    start_stride: 0 where all rows begin with the same. bias: 0, or an address: then a bias is added to each sum,
    which for integers is multiplied by the row's and the output's scale before. fetch: unless a tile goes panel by
    panel (`MicroKernel.by_panel`), it asks for one cache line for every word and panel, `fetch_step` bytes after
    the one before.
    """

    def generate(context, builder, signature, arguments):
        kind, values = signature.args[0].kind, TileArguments(*arguments[1:])
        code = TILE_CODES[kind.operation](builder, kind, values)
        done = builder.append_basic_block("done")
        switch = builder.switch(values.tile_rows, done)
        for rows in kind.rows:
            block = builder.append_basic_block(f"{rows}_rows")
            switch.add_case(I64(rows), block)
            builder.position_at_end(block)
            code.tile(rows)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(kind, *[types.intp] * len(TileArguments._fields)), generate
