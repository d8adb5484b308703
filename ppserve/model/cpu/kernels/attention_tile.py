"""The code of attention's two products, over groups of keys and values that lie anywhere in memory.

A group is up to 16 consecutive positions of one KV block. Its keys are (d, 16) numbers, feature after feature; its
values are panels of 16 features, each (positions, 16). Both are kept as float32, bfloat16 or int8 and become
float32 when they are loaded, so each score is one chain of fused multiply-adds over the features, and each output
one over the positions, in order: the same bits on every CPU, however many rows are computed at once.

d features of a head. Addresses and strides are in bytes.
"""
# mypy: ignore-errors
# (numba types these functions from their arguments; mypy cannot see through its intrinsics)

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ppserve.model.compiled.llvm import F32, I64, call, splat, vector
from ppserve.model.cpu.kernels.kinds import setting
from ppserve.model.cpu.kernels.memory import LINE_BYTES
from ppserve.model.cpu.kernels.storage import ELEMENT_BYTES, load_stored
from ppserve.model.cpu.kernels.tile_code import Code
from ppserve.model.cpu.kernels.variants import NEEDS

GROUP = 16
"""Positions in a group, and features in a panel of values."""


@setting
@dataclass(frozen=True)
class AttentionKernel:
    """storage: how keys and values are kept, a key of ELEMENT_BYTES. lanes: elements of a vector register, 8 or
    16. panels: groups of keys, or panels of values, of a tile. rows: the numbers of rows that a tile may have,
    ascending."""

    storage: str
    lanes: int
    panels: int
    rows: tuple[int, ...]

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.storage]

    @property
    def groups_ahead(self) -> int:
        """How many groups ahead values are fetched: so many that they arrive before they are needed."""
        return 8 // self.element_bytes

    @property
    def most_rows(self) -> int:
        return self.rows[-1]


# As many sums as the registers hold: 16 registers of AVX2, 32 of AVX-512.
_SHAPES = {"avx512": (16, 4, (1, 3, 6)), "portable": (8, 1, (1, 3, 6))}


def attention_kernels(storage: str, variant: str) -> list[AttentionKernel]:
    """Those that `variant` includes, the best first."""
    included = list(NEEDS)[: list(NEEDS).index(variant) + 1]
    return [AttentionKernel(storage, *shape) for name, shape in _SHAPES.items() if name in included]


class _AttentionCode(Code):
    """Emits tiles of one kind."""

    def __init__(self, builder, kind: AttentionKernel, panels: int) -> None:
        super().__init__(builder)
        self.kind, self.panels = kind, panels
        self.parts = GROUP // kind.lanes
        self.part_bytes = kind.lanes * kind.element_bytes
        self.floats = vector(F32, kind.lanes)

    def number(self, table, index):
        """table[index] of int64 at an address."""
        return self.load(self.nth(table, I64(8), index), 0, I64)

    def stored_at(self, address, offset: int):
        """Keys or values at an address as float32."""
        place = self.builder.add(address, I64(offset))
        return load_stored(self.builder, self.kind.storage, place, self.kind.lanes)

    def zeros(self, rows: int):
        zero = ir.Constant(self.floats, [0.0] * self.kind.lanes)
        return [
            [cgutils.alloca_once_value(self.builder, zero) for _ in range(self.panels * self.parts)]
            for _ in range(rows)
        ]

    def step(self, totals, x, x_stride, panels) -> None:
        """One number of each row, the first at x, into 16 numbers of each panel."""
        builder = self.builder
        columns = [self.stored_at(place, part * self.part_bytes) for place in panels for part in range(self.parts)]
        for r, row in enumerate(totals):
            value = splat(builder, self.load(self.nth(x, x_stride, r), 0, F32), self.kind.lanes)
            for total, column in zip(row, columns, strict=True):
                name, addend = f"llvm.fma.v{self.kind.lanes}f32", builder.load(total)
                builder.store(call(builder, name, self.floats, value, column, addend), total)

    def store_sums(self, totals, address_of) -> None:
        """address_of: where a row's panel goes, from the row and the panel."""
        for r, row in enumerate(totals):
            for column, total in enumerate(row):
                panel, part = divmod(column, self.parts)
                self.store(self.builder.load(total), address_of(r, panel), 4 * part * self.kind.lanes)


def _for_each_size(builder, sizes, size, emit) -> None:
    """Code for each of `sizes`, of which the first that is at least `size` is taken."""
    done = builder.append_basic_block("done")
    for rows in sizes:
        here, more = builder.append_basic_block(f"{rows}_rows"), builder.append_basic_block("more")
        builder.cbranch(builder.icmp_signed("<=", size, I64(rows)), here, more)
        builder.position_at_end(here)
        emit(rows)
        builder.branch(done)
        builder.position_at_end(more)
    builder.branch(done)
    builder.position_at_end(done)


@intrinsic
def score(typing, kind, num_rows, queries, stride, size, groups, head, ahead, scores, scores_stride):
    """For rows r and the kind's number of groups g: scores[r] at g's position = Σ_d queries[r, d] · keys[g, d].

    queries: float32 rows, `stride` bytes apart. size: d. groups: the addresses of three int64 arrays: where the
    groups' keys lie, which positions they begin at (times 4, in bytes), where the scales of int8 keys lie; `head`
    is added to the first and the last. ahead: from keys to those that are wanted next, which are fetched.
    """

    def generate(context, builder, signature, arguments):
        _, num_rows, queries, stride, size, groups, head, ahead, scores, scores_stride = arguments
        kind = signature.args[0].kind
        code = _AttentionCode(builder, kind, kind.panels)
        keys, positions, scales = (builder.extract_value(groups, i) for i in range(3))

        def emit(rows):
            totals = code.zeros(rows)
            panels = [builder.add(code.number(keys, I64(panel)), head) for panel in range(kind.panels)]
            with cgutils.for_range(builder, size) as loop:
                offset = builder.mul(loop.index, I64(GROUP * kind.element_bytes))
                here = [builder.add(panel, offset) for panel in panels]
                for place in here:
                    code.fetch(builder.add(place, ahead))
                x = builder.add(queries, builder.mul(loop.index, I64(4)))
                code.step(totals, x, stride, here)
            if kind.storage == "int8":
                for panel in range(kind.panels):
                    place = builder.add(code.number(scales, I64(panel)), head)
                    for part in range(code.parts):
                        scale = code.load(place, 4 * part * kind.lanes, code.floats)
                        for row in totals:
                            total = row[panel * code.parts + part]
                            builder.store(builder.fmul(builder.load(total), scale), total)
            at = [builder.add(scores, code.number(positions, I64(panel))) for panel in range(kind.panels)]
            code.store_sums(totals, lambda r, panel: builder.add(at[panel], builder.mul(scores_stride, I64(r))))

        _for_each_size(builder, kind.rows, num_rows, emit)
        return context.get_dummy_value()

    at = types.intp
    return types.void(kind, at, at, at, at, types.UniTuple(at, 3), at, at, at, at), generate


def _mixing(name: str, panels_of):
    """An intrinsic that mixes the values of as many panels as `panels_of` says."""

    def mix(typing, kind, num_rows, weights, stride, num_groups, groups, panel, panel_bytes, mixed, mixed_stride):
        def generate(context, builder, signature, arguments):
            _, num_rows, weights, stride, num_groups, groups, panel, panel_bytes, mixed, mixed_stride = arguments
            kind = signature.args[0].kind
            code = _AttentionCode(builder, kind, panels_of(kind))
            values, positions, counts = (builder.extract_value(groups, i) for i in range(3))

            def emit(rows):
                totals = code.zeros(rows)
                with cgutils.for_range(builder, num_groups) as group:
                    first = builder.add(code.number(values, group.index), panel)
                    later = builder.add(group.index, I64(kind.groups_ahead))
                    ahead = builder.add(code.number(values, later), panel)
                    x_first = builder.add(weights, code.number(positions, group.index))
                    with cgutils.for_range(builder, code.number(counts, group.index)) as loop:
                        offset = builder.mul(loop.index, I64(GROUP * kind.element_bytes))
                        at = builder.add(first, offset)
                        here = [builder.add(at, builder.mul(panel_bytes, I64(p))) for p in range(code.panels)]
                        lines = -(-code.panels * GROUP * kind.element_bytes // LINE_BYTES)
                        wanted = builder.add(ahead, builder.mul(loop.index, I64(lines * LINE_BYTES)))
                        for line in range(lines):
                            code.fetch(builder.add(wanted, I64(line * LINE_BYTES)))
                        code.step(totals, builder.add(x_first, builder.mul(loop.index, I64(4))), stride, here)

                def address_of(r, p):
                    row = builder.add(mixed, builder.mul(mixed_stride, I64(r)))
                    return builder.add(row, I64(4 * GROUP * p))

                code.store_sums(totals, address_of)

            _for_each_size(builder, kind.rows, num_rows, emit)
            return context.get_dummy_value()

        at = types.intp
        return types.void(kind, at, at, at, at, types.UniTuple(at, 3), at, at, at, at), generate

    mix.__name__ = name
    mix.__doc__ = """For rows r and the features f of some panels: mixed[r, f] = Σ_p weights[r, p] · values[p, f].

    weights: float32 rows, `stride` bytes apart. groups: the addresses of three int64 arrays: where the groups'
    values lie (and one more address, of what is wanted next), which positions they begin at (times 4, in bytes),
    how many they have. panel: what is added to the first. panel_bytes: from a panel to the next.
    """
    return intrinsic(mix)


mix_panels = _mixing("mix_panels", lambda kind: kind.panels)
mix_panel = _mixing("mix_panel", lambda kind: 1)
