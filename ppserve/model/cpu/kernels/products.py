"""Products of packed rows and packed weights, and which micro-kernel makes them on which CPU.

Rows and panels pass in blocks that stay in the caches; a sum that is not complete is stored and loaded again,
which is exact. While a tile is computed, the panels after it are fetched, so that the arithmetic units do not wait
for memory. Where a CPU is better at it (AVX-512, few rows) that is left to it: `MicroKernel.by_panel`,
`fetches_alone`.

T rows, N outputs.
"""
# mypy: ignore-errors
# (numba types these functions from their arguments; mypy cannot see through its intrinsics)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ppserve.model.compiled.jit import inlined
from ppserve.model.cpu.kernels.memory import LINE_BYTES
from ppserve.model.cpu.kernels.micro_kernel import configure, multiply_tile, release
from ppserve.model.cpu.kernels.tile_code import CHUNK_BYTES, PANEL, MicroKernel
from ppserve.model.cpu.kernels.variants import NEEDS, Features


@dataclass(frozen=True)
class _Choice:
    precision: str
    variant: str  # the weakest that can run it
    needs: frozenset[str]  # beyond the variant
    kind: MicroKernel


def _choice(precision: str, variant: str, kind: MicroKernel, *needs: str) -> _Choice:
    return _Choice(precision, variant, frozenset(needs), kind)


def _up_to(rows: int) -> tuple[int, ...]:
    """Some numbers of rows; each takes a third of a second to compile."""
    return tuple(size for size in (1, 2, 3, 4, 5, 6, 8, 10, 12) if size <= rows)


def _few(by_panel: int) -> dict[str, Any]:
    """Where fetching ahead is worse than none for a tile that is alone: measured on Zen 4."""
    return {"by_panel": by_panel, "fetches_alone": False}


# As many sums as the registers hold beside what is multiplied: 16 registers of AVX2, 32 of AVX-512.
CHOICES = (
    _choice("float32", "avx512", MicroKernel("fma", 16, 2, _up_to(12), **_few(4))),
    _choice("float32", "portable", MicroKernel("fma", 8, 1, _up_to(6))),
    _choice("bfloat16", "amx", MicroKernel("bf16_tiles", 16, 2, (16, 32))),
    _choice("bfloat16", "avx512_bf16", MicroKernel("bf16_dot", 16, 2, _up_to(12), **_few(6))),
    _choice("bfloat16", "avx512", MicroKernel("bf16_fma", 16, 2, _up_to(12), **_few(4))),
    _choice("bfloat16", "portable", MicroKernel("bf16_fma", 8, 1, _up_to(5))),
    _choice("int8", "amx", MicroKernel("int8_tiles", 16, 2, (16, 32))),
    _choice("int8", "avx512", MicroKernel("int8_dot", 16, 2, _up_to(12), by_panel=6), "avx512vnni"),
    _choice("int8", "avx512", MicroKernel("int8_pairs", 16, 2, _up_to(12), by_panel=6)),
    _choice("int8", "avx2", MicroKernel("int8_dot", 8, 1, _up_to(6)), "avxvnni"),
    _choice("int8", "portable", MicroKernel("int8_pairs", 8, 1, _up_to(4))),
)
"""All micro-kernels, of each precision the best first."""


def micro_kernels(precision: str, variant: str, found: Features) -> list[MicroKernel]:
    """Those that a CPU with these features can run and that `variant` includes, the best first."""
    included = list(NEEDS)[: list(NEEDS).index(variant) + 1]
    return [
        choice.kind
        for choice in CHOICES
        if choice.precision == precision and choice.variant in included and choice.needs <= found
    ]


def multiplies_bfloat16(variant: str, found: Features) -> bool:
    """Whether a variant's kernels multiply bfloat16 numbers as such, rather than as float32."""
    return micro_kernels("bfloat16", variant, found)[0].operation != "bf16_fma"


class Weights(NamedTuple):
    """Packed weights as kernels see them. panels, start, bias, scales: addresses; start: of what sums begin with;
    bias: 0 where sums are results already. chunks: of one output. outputs: with padding."""

    panels: int
    start: int
    bias: int
    scales: int
    chunks: int
    outputs: int


class PackedRows(NamedTuple):
    """Packed rows as kernels see them. words, scales: addresses."""

    words: int
    scales: int
    count: int
    tile_rows: int


@inlined
def multiply(kind, weights, rows, y, first_panel, end_panel, following):
    """y = x Wᵀ + bias for the outputs of panels first_panel .. end_panel, both multiples of 2. y: the address of
    (T and as many rows as make whole tiles, N) float32. following: the address of what is read next, 0: not known.
    """
    tile_chunk_bytes = rows.tile_rows * LINE_BYTES * kind.steps
    tile_bytes = tile_chunk_bytes * weights.chunks
    panel_bytes = weights.chunks * CHUNK_BYTES
    y_stride = 4 * weights.outputs
    num_tiles = -(-rows.count // rows.tile_rows)
    tiles_at_once = max(1, kind.rows_at_once // rows.tile_rows)
    configure(kind)
    for first_tile in range(0, num_tiles, tiles_at_once):
        end_tile = min(num_tiles, first_tile + tiles_at_once)
        fetches = num_tiles > 1 or kind.fetches_alone
        fetch_step = -(-LINE_BYTES // (end_tile - first_tile)) if fetches else 0
        for chunk in range(0, weights.chunks, kind.chunks_at_once):
            chunks = min(kind.chunks_at_once, weights.chunks - chunk)
            bias = weights.bias if chunk + chunks == weights.chunks else 0
            if chunk + chunks < weights.chunks:
                then = weights.panels + first_panel * panel_bytes + (chunk + chunks) * CHUNK_BYTES
            elif end_tile < num_tiles or following == 0:
                then = weights.panels + first_panel * panel_bytes
            else:
                then = following
            for panel in range(first_panel, end_panel, kind.panels):
                at = 4 * PANEL * panel
                block = weights.panels + panel * panel_bytes + chunk * CHUNK_BYTES
                after = block + kind.panels * panel_bytes if panel + kind.panels < end_panel else then
                if not fetches:
                    after = block  # which is there: nothing moves
                for tile in range(first_tile, end_tile):
                    row = tile * rows.tile_rows
                    y_at = y + row * y_stride + at
                    start, start_stride = (weights.start + at, 0) if chunk == 0 else (y_at, y_stride)
                    fetch = after + (tile - first_tile) * chunks * PANEL * fetch_step
                    multiply_tile(
                        kind, rows.tile_rows, rows.words + tile * tile_bytes + chunk * tile_chunk_bytes,
                        block, panel_bytes, chunks, start, start_stride, y_at, y_stride,
                        bias + at if bias else 0, weights.scales + at, rows.scales + 4 * row, fetch, fetch_step,
                    )  # fmt: skip
    release(kind)
