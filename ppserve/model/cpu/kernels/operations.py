"""What one step of a micro-kernel does: it multiplies a word of a row into the words of several outputs.

| operation | a word is | a step is | needs |
|---|---|---|---|
| `fma` | a float32 | one fused multiply-add | |
| `bf16_fma` | 2 bfloat16 | two fused multiply-adds in float32, the second input of the pair first | |
| `bf16_dot` | 2 bfloat16 | `vdpbf16ps`: the same two multiply-adds | AVX512-BF16 |
| `bf16_tiles` | 2 bfloat16 | `tdpbf16ps`: the first inputs of 16 pairs, then the second, then both | AMX-BF16 |
| `int8_pairs` | 4 int8 | two `vpmaddwd` of int16 pairs, which cannot overflow | |
| `int8_dot` | 4 int8 | `vpdpbusd`, the rows' values raised by 128 to be unsigned | AVX-VNNI or AVX512-VNNI |
| `int8_tiles` | 4 int8 | `tdpbusd`; few rows: `vpdpbusd` | AMX-INT8 |
| `int4_pairs` | 8 of 4 bits | four `vpmaddwd` of int16 pairs | |
| `int4_dot` | 8 of 4 bits | two `vpdpbusd`: lower halves of bytes, then the upper | AVX-VNNI or AVX512-VNNI |

`bf16_fma` and `bf16_dot` give the same bits as long as no denormal number occurs, because the instructions take
those as zeros. The same holds for few and many rows of `bf16_tiles`. Rounding to bfloat16 drops what is below
SMALLEST_BF16, so every product and every sum is 0 or at least 2**-124. Integers are exact, so all int8 operations
agree. The int4 operations add up the exact integers of 32 inputs each, and these sums by float32 multiply-adds in
order (`group_tile`), so all of them agree.
"""
# mypy: ignore-errors
# (LLVM values have no types that mypy could check)

from __future__ import annotations

from abc import ABC, abstractmethod

from llvmlite import ir

from ppserve.model.compiled.llvm import F32, I8, I16, I32, I64, call, constant, shuffle, splat, vector

SMALLEST_BF16 = 2.0**-55
"""Where inputs and weights of products are rounded to bfloat16, smaller numbers than this become 0."""


class BFloat16(ir.Type):
    """LLVM's bfloat, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    __str__ = _to_string

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat16)

    def __hash__(self) -> int:
        return hash("bfloat")


def round_to_bfloat16(builder, values, integer):
    """Round one float32 number or several to bfloat16, as int16 of the same shape: to nearest even. A NaN stays a
    NaN (its quiet bit is set). integer: the type int32 of the same shape."""
    several = isinstance(integer, ir.VectorType)

    def number(value: int):
        return constant(I32, integer.count, value) if several else I32(value)

    raw = builder.bitcast(values, integer)
    odd = builder.and_(builder.lshr(raw, number(16)), number(1))
    rounded = builder.add(builder.add(raw, number(0x7FFF)), odd)
    is_nan = builder.fcmp_unordered("uno", values, values)
    chosen = builder.select(is_nan, builder.or_(raw, number(0x400000)), rounded)
    return builder.trunc(builder.lshr(chosen, number(16)), vector(I16, integer.count) if several else I16)


def inputs_in_bfloat16(builder, values):
    """Round <16 x float> to bfloat16, as <16 x i16>: to nearest even, and numbers below SMALLEST_BF16 to 0."""
    size = call(builder, "llvm.fabs.v16f32", values.type, values)
    is_small = builder.fcmp_ordered("<", size, ir.Constant(values.type, [SMALLEST_BF16] * 16))
    kept = builder.select(is_small, ir.Constant(values.type, [0.0] * 16), values)
    return round_to_bfloat16(builder, kept, vector(I32, 16))


class Operation(ABC):
    """An operation of registers of `lanes` elements of 32 bits.

    arithmetic: operations with the same arithmetic give the same bits. steps: how many steps one word takes; a
    row's tile has a word for each of them. sums: the type in which they are added up. inputs: how many are in a
    word. words: how many are in a chunk. tail_lines: how many cache lines follow the words of a chunk's 16
    outputs. row_tail_bytes: how many bytes follow those of a row. raised: what is added to a row's values before
    they are multiplied. unroll: how many words one piece of code multiplies; longer pieces LLVM rearranges so that
    values no longer fit the registers.
    """

    arithmetic: str
    steps = 1
    sums: ir.Type = F32
    inputs = 1
    words = 16
    tail_lines = row_tail_bytes = 0
    raised = 0
    unroll = 4

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes

    @staticmethod
    def packed(builder, values):
        """Return 16 consecutive inputs of a row, given as <16 x float>, as the row's tile holds them. Those of
        int8 are given as whole numbers from -127 to 127 with 1.5 * 2**23 added, which leaves them in the low
        bits."""
        return values

    @abstractmethod
    def weights(self, builder, column, step: int):
        """Return what a step multiplies, from <lanes x i32>. It is made once and used for all rows."""

    @abstractmethod
    def row(self, builder, pointer, step: int):
        """Return what a step multiplies the weights by, from a row's words at a pointer."""

    @abstractmethod
    def step(self, builder, total, row, weights):
        """Return the sums after a step."""

    def _word(self, builder, pointer, offset: int, kind: ir.Type):
        """Return a register with a row's word in every element: the one `offset` words behind a pointer."""
        place = builder.bitcast(builder.gep(pointer, [I64(4 * offset)]), kind.as_pointer())
        return splat(builder, builder.load(place, align=4), self.lanes)


class Fma(Operation):
    """float32."""

    arithmetic = "float32"

    def weights(self, builder, column, step):
        return builder.bitcast(column, vector(F32, self.lanes))

    def row(self, builder, pointer, step):
        return self._word(builder, pointer, 0, F32)

    def step(self, builder, total, row, weights):
        return call(builder, f"llvm.fma.v{self.lanes}f32", total.type, row, weights, total)


class BFloat16Fma(Fma):
    """bfloat16 pairs, multiplied as float32. A row's tile holds float32."""

    arithmetic = "bfloat16 pairs"
    steps = 2
    inputs = 2

    @staticmethod
    def packed(builder, values):
        wide = builder.zext(inputs_in_bfloat16(builder, values), vector(I32, 16))
        return builder.shl(wide, constant(I32, 16, 16))

    def weights(self, builder, column, step):
        if step == 0:
            bits = builder.and_(column, constant(I32, self.lanes, 0xFFFF0000))
        else:
            bits = builder.shl(column, constant(I32, self.lanes, 16))
        return builder.bitcast(bits, vector(F32, self.lanes))

    def row(self, builder, pointer, step):
        return self._word(builder, pointer, 1 - step, F32)


class BFloat16Dot(Operation):
    """bfloat16 pairs, multiplied by AVX512-BF16. A row's tile holds bfloat16."""

    arithmetic = "bfloat16 pairs"
    inputs = 2

    @staticmethod
    def packed(builder, values):
        return inputs_in_bfloat16(builder, values)

    def weights(self, builder, column, step):
        return builder.bitcast(column, vector(BFloat16(), 2 * self.lanes))

    def row(self, builder, pointer, step):
        return builder.bitcast(self._word(builder, pointer, 0, I32), vector(BFloat16(), 2 * self.lanes))

    def step(self, builder, total, row, weights):
        name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * self.lanes}"
        return call(builder, name, total.type, total, weights, row)


def multiply_pairs(builder, total, row, weights):
    """Return the sums after the products of int16 pairs. LLVM makes `vpmaddwd` of it where the CPU has it."""
    count = weights.type.count
    wide = vector(I32, count)
    products = builder.mul(builder.sext(row, wide), builder.sext(weights, wide))
    first, second = (shuffle(builder, products, list(range(i, count, 2))) for i in (0, 1))
    return builder.add(total, builder.add(first, second))


class Int8Pairs(Operation):
    """int8, multiplied as pairs of int16. A row's tile holds int16: for four inputs a word with the first and
    third, then one with the others."""

    arithmetic = "int8"
    unroll = 1
    steps = 2
    sums = I32
    inputs = 4

    @staticmethod
    def packed(builder, values):
        halves = builder.trunc(builder.bitcast(values, vector(I32, 16)), vector(I16, 16))
        return shuffle(builder, halves, [4 * word + i for word in range(4) for i in (0, 2, 1, 3)])

    def weights(self, builder, column, step):
        eight = constant(I16, 2 * self.lanes, 8)
        pairs = builder.bitcast(column, vector(I16, 2 * self.lanes))
        return builder.ashr(builder.shl(pairs, eight) if step == 0 else pairs, eight)

    def row(self, builder, pointer, step):
        return builder.bitcast(self._word(builder, pointer, step, I32), vector(I16, 2 * self.lanes))

    def step(self, builder, total, row, weights):
        return multiply_pairs(builder, total, row, weights)


class Int8Dot(Operation):
    """int8, multiplied by VNNI. A row's tile holds uint8, raised by 128; a sum begins at -128 times the weights'
    sum."""

    arithmetic = "int8"
    sums = I32
    inputs = 4
    raised = 128

    @staticmethod
    def packed(builder, values):
        raised = builder.add(builder.bitcast(values, vector(I32, 16)), constant(I32, 16, 128))
        return builder.trunc(raised, vector(I8, 16))

    def weights(self, builder, column, step):
        return column

    def row(self, builder, pointer, step):
        return self._word(builder, pointer, 0, I32)

    def step(self, builder, total, row, weights):
        return call(builder, f"llvm.x86.avx512.vpdpbusd.{32 * self.lanes}", total.type, total, row, weights)


class Int4(Operation):
    """4 bits, in groups of 32 inputs, of which each is a chunk. After a chunk's words come 16 words of two float16
    numbers: an output's scale and, in the upper half, its minimum. After a row's words come its scale and the sum
    of its inputs, in float32. sums: those within a group."""

    arithmetic = "int4"
    sums = I32
    inputs = 8
    words = 4
    tail_lines, row_tail_bytes = 1, 8
    unroll = 2

    def row(self, builder, pointer, step):
        return self._word(builder, pointer, step, I32)


class Int4Pairs(Int4):
    """4 bits, multiplied as pairs of int16. A row's tile holds the same as that of `Int8Pairs`."""

    steps = 4
    unroll = 1
    packed = Int8Pairs.packed

    def weights(self, builder, column, step):
        pairs = builder.bitcast(column, vector(I16, 2 * self.lanes))
        shift = (0, 8, 4, 12)[step]
        return builder.and_(
            builder.lshr(pairs, constant(I16, 2 * self.lanes, shift)), constant(I16, 2 * self.lanes, 15)
        )

    def step(self, builder, total, row, weights):
        return multiply_pairs(builder, total, builder.bitcast(row, weights.type), weights)


class Int4Dot(Int4):
    """4 bits, multiplied by VNNI. A row's tile holds int8."""

    steps = 2

    @staticmethod
    def packed(builder, values):
        return builder.trunc(builder.bitcast(values, vector(I32, 16)), vector(I8, 16))

    def weights(self, builder, column, step):
        shifted = builder.lshr(column, constant(I32, self.lanes, 4)) if step else column
        return builder.and_(shifted, constant(I32, self.lanes, 0x0F0F0F0F))

    def step(self, builder, total, row, weights):
        return call(builder, f"llvm.x86.avx512.vpdpbusd.{32 * self.lanes}", total.type, total, weights, row)


class BFloat16Tiles(Operation):
    """bfloat16 pairs, multiplied by AMX. The code here is for few rows: it has the sums of the pairs' first inputs
    and, beside them, those of the second."""

    arithmetic = "bfloat16 pairs by AMX"
    inputs = 2
    packed = BFloat16Dot.packed
    instruction = "tdpbf16ps"

    def weights(self, builder, column, step):
        twice = shuffle(builder, column, [*range(self.lanes)] * 2)
        shifts = ir.Constant(twice.type, [16] * self.lanes + [0] * self.lanes)
        bits = builder.and_(builder.shl(twice, shifts), constant(I32, 2 * self.lanes, 0xFFFF0000))
        return builder.bitcast(bits, vector(F32, 2 * self.lanes))

    def row(self, builder, pointer, step):
        return self.weights(builder, self._word(builder, pointer, 0, I32), step)

    def step(self, builder, total, row, weights):
        return call(builder, f"llvm.fma.v{2 * self.lanes}f32", total.type, row, weights, total)


class Int8Tiles(Int8Dot):
    """int8, multiplied by AMX. Few rows are multiplied as `Int8Dot` does it."""

    instruction = "tdpbusd"


OPERATIONS: dict[str, type[Operation]] = {
    "fma": Fma,
    "bf16_fma": BFloat16Fma,
    "bf16_dot": BFloat16Dot,
    "bf16_tiles": BFloat16Tiles,
    "int8_pairs": Int8Pairs,
    "int8_dot": Int8Dot,
    "int8_tiles": Int8Tiles,
    "int4_pairs": Int4Pairs,
    "int4_dot": Int4Dot,
}
