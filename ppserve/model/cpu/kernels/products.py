"""Products of packed rows and packed weights, and which micro-kernel makes them on which CPU.

Rows and weights consist of words of 32 bits: one float32, two bfloat16, four int8 or eight int4 values, which are
consecutive inputs. The micro-kernel (as in BLIS: Van Zee and van de Geijn, 2015) multiplies a few rows by a few
panels of weights and keeps the sums in registers. A word of a row is multiplied into the words of 16 outputs at
once. Each output is one chain of such steps over its words, in order, so its bits depend on its own inputs alone.

    weights  (N / 16, W, 16) words: panels of 16 outputs; N padded with zeros to a multiple of 64, W to one of 16
    rows     tiles of R rows, each (W / 16, R, 16) words: 16 words of one row, then of the next
    sums     (T, N) float32 or int32, row after row, with memory for whole tiles

Rows and panels are multiplied in blocks that stay in the caches. A sum that is not complete is stored and loaded
again, which is exact. While a tile is computed, the panels after it are prefetched, so that the arithmetic units
do not wait for memory. Where a CPU does that better by itself, it is left to it (`MicroKernel.reads_alone`).

T rows, N outputs, W words of a row. Addresses and strides are in bytes.
"""
# mypy: ignore-errors
# (numba types these functions from their arguments)

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from numba import types
from numba.extending import intrinsic

from ppserve.model.compiled.jit import inlined
from ppserve.model.compiled.lanes import lanes
from ppserve.model.compiled.llvm import I64
from ppserve.model.cpu.kernels.amx_tile import AmxTile, BFloat16Tile
from ppserve.model.cpu.kernels.group_tile import GroupTile
from ppserve.model.cpu.kernels.memory import LINE_BYTES
from ppserve.model.cpu.kernels.operations import OPERATIONS
from ppserve.model.cpu.kernels.tile_code import PANEL, MicroKernel, TileArguments, VectorTile
from ppserve.model.cpu.kernels.variants import Features, included

TILE_CODES = dict.fromkeys(OPERATIONS, VectorTile) | {
    "bf16_tiles": BFloat16Tile,
    "int8_tiles": AmxTile,
    **dict.fromkeys(("int4_dot", "int4_pairs"), GroupTile),
}


@intrinsic
def pack(typing, kind, place, values):
    """Write 16 consecutive inputs of a row to an address, in the form of `Operation.packed`."""

    def generate(context, builder, signature, arguments):
        _, place, values = arguments
        packed = OPERATIONS[signature.args[0].kind.operation].packed(builder, values)
        builder.store(packed, builder.inttoptr(place, packed.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(kind, types.intp, lanes), generate


def _on_tile_unit(name, doc):
    """Return an intrinsic that calls this method of AMX's unit. For kernels without AMX it does nothing."""

    def ask(typing, kind):
        def generate(context, builder, signature, arguments):
            code = TILE_CODES[signature.args[0].kind.operation]
            if issubclass(code, AmxTile):
                getattr(code.unit(builder), name)()
            return context.get_dummy_value()

        return types.void(kind), generate

    ask.__name__, ask.__doc__ = name, doc
    return intrinsic(ask)


configure = _on_tile_unit("configure", "Prepare the registers of a micro-kernel, before its first tile.")
release = _on_tile_unit("release", "Undo `configure`, after the last tile.")


@intrinsic
def multiply_tile(
    typing, kind, tile_rows, x, weights, panel_bytes, chunks, start, start_stride, y, y_stride, bias,
    output_scales, row_scales, fetch, fetch_step,
):  # fmt: skip
    """Compute for the rows r of a tile and the outputs n of its panels, which are `panel_bytes` apart:

        y[r, n] = start[r, n] + Σ over 16 * chunks words of x[r] · weights[n]

    start_stride: 0 where all rows begin with the same numbers. bias: the address of a bias, or 0. If there is one,
    the sums are complete: those of integers are multiplied by the row's and the output's scale, then the bias is
    added. fetch: for every word and panel a cache line is prefetched, the first one here and each `fetch_step`
    bytes after the last; a tile that is computed panel by panel prefetches nothing.
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


class Choice(NamedTuple):
    """A micro-kernel, and which CPUs can run it."""

    precision: str
    variant: str
    """The weakest kernel variant that can run it."""
    kind: MicroKernel
    needs: frozenset[str] = frozenset()
    """The features that a CPU must have beside the variant's."""


def _up_to(rows: int) -> tuple[int, ...]:
    """Return the numbers of rows, up to `rows`, for which there is code. Each takes a third of a second to
    compile."""
    return tuple(size for size in (1, 2, 3, 4, 5, 6, 8, 10, 12) if size <= rows)


# A chunk of int4 is a group of 32 inputs; with twice as many chunks, a block of rows takes as much memory as in
# other precisions. CPUs with AMX use VNNI for int4: a group's sums are scaled, and AMX would have to store them
# first.
_GROUPS = {"chunks_at_once": 128}

# A tile has as many sums as the registers hold beside what is multiplied: AVX2 has 16 registers, AVX-512 has 32.
CHOICES = (
    Choice("float32", "avx512", MicroKernel("fma", 16, 2, _up_to(12))),
    Choice("float32", "portable", MicroKernel("fma", 8, 1, _up_to(6))),
    Choice("bfloat16", "amx", MicroKernel("bf16_tiles", 16, 2, (1, 2, 4, 16, 32))),
    Choice("bfloat16", "avx512_bf16", MicroKernel("bf16_dot", 16, 2, _up_to(12))),
    Choice("bfloat16", "avx512", MicroKernel("bf16_fma", 16, 2, _up_to(12))),
    Choice("bfloat16", "portable", MicroKernel("bf16_fma", 8, 1, _up_to(5))),
    Choice("int8", "amx", MicroKernel("int8_tiles", 16, 2, (1, 2, 4, 16, 32))),
    Choice("int8", "avx512", MicroKernel("int8_dot", 16, 2, _up_to(12)), frozenset({"avx512vnni"})),
    Choice("int8", "avx512", MicroKernel("int8_pairs", 16, 2, _up_to(12))),
    Choice("int8", "avx2", MicroKernel("int8_dot", 8, 1, _up_to(6)), frozenset({"avxvnni"})),
    Choice("int8", "portable", MicroKernel("int8_pairs", 8, 1, _up_to(4))),
    Choice("int4", "avx512", MicroKernel("int4_dot", 16, 2, _up_to(5), **_GROUPS), frozenset({"avx512vnni"})),
    Choice("int4", "avx512", MicroKernel("int4_pairs", 16, 2, _up_to(6), **_GROUPS)),
    Choice("int4", "avx2", MicroKernel("int4_dot", 8, 1, _up_to(5), **_GROUPS), frozenset({"avxvnni"})),
    Choice("int4", "portable", MicroKernel("int4_pairs", 8, 1, _up_to(6), **_GROUPS)),
)
"""All micro-kernels. Those of one precision stand together, the best first."""


def micro_kernels(precision: str, variant: str, found: Features) -> list[MicroKernel]:
    """List the kernels that a CPU with these features can run and that `variant` includes, the best first."""
    is_amd = "sse4a" in found
    return [
        replace(choice.kind, reads_alone=is_amd and choice.kind.lanes == PANEL)
        for choice in CHOICES
        if choice.precision == precision and choice.variant in included(variant) and choice.needs <= found
    ]


def multiplies_bfloat16(variant: str, found: Features) -> bool:
    """Return whether a variant's kernels multiply bfloat16 numbers as such, rather than as float32."""
    return micro_kernels("bfloat16", variant, found)[0].operation != "bf16_fma"


class Weights(NamedTuple):
    """Packed weights as kernels see them.

    panels, start, bias, scales: addresses. start: the numbers with which sums begin. bias: 0 if complete sums are
    the results already. chunks: their number in one output. outputs: their number, padding included.
    """

    panels: int
    start: int
    bias: int
    scales: int
    chunks: int
    outputs: int


class Scratch(NamedTuple):
    """The memory that the threads of a stage write while they compute a step.

    num_rows: the rows of the step. tile_rows: the rows of each tile of packed rows. The others are addresses.
    words, scales: the packed rows. y: the results of products. inner: the rows between the two jobs of a sublayer.
    values: a row for each thread, `values_stride` bytes apart.
    """

    num_rows: int
    tile_rows: int
    words: int
    scales: int
    y: int
    inner: int
    values: int
    values_stride: int


@inlined
def multiply(kind, weights, rows, y, first_panel, end_panel):
    """Compute y = x Wᵀ + bias for the outputs of the panels from first_panel up to end_panel, which are multiples
    of 2.

    rows: the `Scratch` with the packed rows x. y: the address of (T, N) float32, with T filled up to whole tiles.
    """
    num_tiles = -(-rows.num_rows // rows.tile_rows)
    tiles_at_once = max(1, kind.rows_at_once // rows.tile_rows)
    first_weights = weights.panels + first_panel * weights.chunks * kind.chunk_bytes
    configure(kind)
    for first_tile in range(0, num_tiles, tiles_at_once):
        end_tile = min(num_tiles, first_tile + tiles_at_once)
        for chunk in range(0, weights.chunks, kind.chunks_at_once):
            end_chunk = min(weights.chunks, chunk + kind.chunks_at_once)
            then = first_weights
            if end_chunk < weights.chunks:
                then += end_chunk * kind.chunk_bytes
            elif end_tile == num_tiles:  # the thread's next panels are likely to follow these
                then += (end_panel - first_panel) * weights.chunks * kind.chunk_bytes
            _multiply_block(
                kind, weights, rows, y, first_panel, end_panel, first_tile, end_tile, chunk, end_chunk, then
            )
    release(kind)


@inlined
def _multiply_block(
    kind, weights, rows, y, first_panel, end_panel, first_tile, end_tile, chunk, end_chunk, then
):  # fmt: skip
    """Compute the part of `multiply` that some tiles of rows and some chunks make. then: what is prefetched at its
    end."""
    panel_bytes, chunks, y_stride = weights.chunks * kind.chunk_bytes, end_chunk - chunk, 4 * weights.outputs
    chunk_bytes = rows.tile_rows * kind.row_bytes
    bias = weights.bias if end_chunk == weights.chunks else 0
    fetches = rows.num_rows > rows.tile_rows or not kind.reads_alone
    fetch_step = -(-LINE_BYTES // (end_tile - first_tile)) if fetches else 0
    for panel in range(first_panel, end_panel, kind.panels):
        at = 4 * PANEL * panel
        block = weights.panels + panel * panel_bytes + chunk * kind.chunk_bytes
        after = block + kind.panels * panel_bytes if panel + kind.panels < end_panel else then
        if not fetches:
            after = block  # it is in the cache already, so nothing is fetched
        for tile in range(first_tile, end_tile):
            row = tile * rows.tile_rows
            y_at = y + row * y_stride + at
            start, start_stride = (weights.start + at, 0) if chunk == 0 else (y_at, y_stride)
            fetch = after + (tile - first_tile) * chunks * kind.chunk_lines * fetch_step
            multiply_tile(
                kind, rows.tile_rows, rows.words + (tile * weights.chunks + chunk) * chunk_bytes,
                block, panel_bytes, chunks, start, start_stride, y_at, y_stride,
                bias + at if bias else 0, weights.scales + at, rows.scales + 4 * row, fetch, fetch_step,
            )  # fmt: skip
