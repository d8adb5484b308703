"""Sixteen float32 lanes as a value inside numba kernels, and the arithmetic on them.

numba has no SIMD types, and without fast-math LLVM may not vectorise a sum. So kernels do it explicitly. A `lanes`
value is LLVM's <16 x float> (two AVX2 registers, one of AVX-512, four of NEON). Every operation here is exact IEEE
arithmetic per lane (`fma` is a fused multiply-add on every machine), or a reduction in a fixed tree. So results
depend only on the order in which a kernel is written, and not on the vectoriser, other rows or the CPU's model.

Memory is addressed as `load(array, index)` on flat arrays of float32, or on their address as an integer. Indices
are not checked.
"""
# mypy: ignore-errors
# (numba types these functions from their arguments)

from __future__ import annotations

import operator

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, lower_builtin, models, register_model, type_callable

from ppserve.model.compiled.jit import inlined
from ppserve.model.compiled.llvm import F32, I32, I64, call, constant, shuffle, vector
from ppserve.model.compiled.llvm import splat as emit_splat

WIDTH = 16
_LANES, _BITS = vector(F32, WIDTH), vector(I32, WIDTH)


class LanesType(types.Type):
    """numba's name for the <16 x float> value."""

    def __init__(self) -> None:
        super().__init__("Lanes")


lanes = LanesType()


@register_model(LanesType)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type) -> None:
        super().__init__(dmm, fe_type, _LANES)


def _address(context, builder, array_type, array, index, kind):
    """Return the address of array[index] as a pointer to `kind`."""
    if isinstance(array_type, types.Integer):
        start = builder.inttoptr(array, F32.as_pointer())
    else:
        start = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(start, [index]), kind.as_pointer())


@intrinsic
def splat(typing, scalar):
    """Return a value that has this float32 in every lane."""

    def generate(context, builder, signature, arguments):
        return emit_splat(builder, arguments[0], WIDTH)

    return lanes(types.float32), generate


def _loading(element, result):
    """Return an intrinsic that loads this type from array[index]."""

    def load(typing, array, index):
        def generate(context, builder, signature, arguments):
            return builder.load(_address(context, builder, signature.args[0], *arguments, element), align=4)

        return result(array, types.intp), generate

    return intrinsic(load)


def _storing(element, kind):
    """Return an intrinsic that stores this type to array[index]."""

    def store(typing, array, index, value):
        def generate(context, builder, signature, arguments):
            array, index, value = arguments
            builder.store(value, _address(context, builder, signature.args[0], array, index, element), align=4)
            return context.get_dummy_value()

        return types.void(array, types.intp, kind), generate

    return intrinsic(store)


load, store = _loading(_LANES, lanes), _storing(_LANES, lanes)
"""Load, or store, 16 float32 numbers from array[index] on."""
load_one = _loading(F32, types.float32)
store_one = _storing(F32, types.float32)


@intrinsic
def load_int(typing, address, index):
    """Return int64 number `index` behind an address."""

    def generate(context, builder, signature, arguments):
        return builder.load(_int_at(builder, *arguments))

    return types.int64(types.intp, types.intp), generate


@intrinsic
def store_int(typing, address, index, value):
    """Store int64 number `index` behind an address."""

    def generate(context, builder, signature, arguments):
        address, index, value = arguments
        builder.store(value, _int_at(builder, address, index))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.int64), generate


def _int_at(builder, address, index):
    return builder.gep(builder.inttoptr(address, I64.as_pointer()), [index])


@intrinsic
def fma(typing, a, b, c):
    """Return a * b + c per lane, rounded once."""

    def generate(context, builder, signature, arguments):
        return call(builder, "llvm.fma.v16f32", _LANES, *arguments)

    return lanes(lanes, lanes, lanes), generate


def _operator(symbol, name: str) -> None:
    """Let kernels write this operator between lanes. name: that of the instruction."""

    @type_callable(symbol)
    def result(context):
        return lambda a, b: lanes if a is lanes and b is lanes else None

    @lower_builtin(symbol, LanesType, LanesType)
    def emit(context, builder, signature, arguments):
        return getattr(builder, name)(*arguments)


for _symbol, _name in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _operator(_symbol, _name)


@intrinsic
def where_greater(typing, a, b, yes, no):
    """Return, per lane, `yes` where a > b, else `no` (also where a or b is a NaN)."""

    def generate(context, builder, signature, arguments):
        a, b, yes, no = arguments
        return builder.select(builder.fcmp_ordered(">", a, b), yes, no)

    return lanes(lanes, lanes, lanes, lanes), generate


@intrinsic
def keep_first(typing, value, count, other):
    """Return the lanes below `count` of `value`, and the other lanes of `other`."""

    def generate(context, builder, signature, arguments):
        value, count, other = arguments
        index = ir.Constant(_BITS, list(range(WIDTH)))
        below = builder.icmp_signed("<", index, emit_splat(builder, builder.trunc(count, I32), WIDTH))
        return builder.select(below, value, other)

    return lanes(lanes, types.intp, lanes), generate


def _reduction(combination):
    """Return an intrinsic that reduces lanes by halves: 8 + 8, 4 + 4, 2 + 2, 1 + 1. combination: makes the
    function that combines two halves."""

    def reduce(typing, value):
        def generate(context, builder, signature, arguments):
            (value,), combine, width = arguments, combination(builder), WIDTH
            while width > 1:
                width //= 2
                low = shuffle(builder, value, list(range(width)))
                value = combine(low, shuffle(builder, value, list(range(width, 2 * width))))
            return builder.extract_element(value, I32(0))

        return types.float32(lanes), generate

    return intrinsic(reduce)


sum_lanes = _reduction(lambda builder: builder.fadd)
max_lanes = _reduction(lambda builder: lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))
"""Return the greatest lane. If there is a NaN, any lane may be returned."""


@intrinsic
def _times_power_of_two(typing, value, shifted):
    """Return value * 2**n for -126 <= n <= 127. shifted: n + 1.5 * 2**23, whose low bits are n."""

    def generate(context, builder, signature, arguments):
        value, shifted = arguments
        exponent = builder.add(builder.bitcast(shifted, _BITS), constant(I32, WIDTH, 127))
        return builder.fmul(value, builder.bitcast(builder.shl(exponent, constant(I32, WIDTH, 23)), _LANES))

    return lanes(lanes, lanes), generate


_ROUND = np.float32(1.5 * 2**23)
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(-0.693359375), np.float32(2.12194440e-4)
_LEAST, _MOST = np.float32(-87.3), np.float32(88.3)
_C6, _C5, _C4 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_C3, _C2, _C1 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(0.5)
_ONE, _ZERO = np.float32(1.0), np.float32(0.0)


@inlined
def exp(x):
    """Return e**x per lane, with an error of at most 2 units in the last place. It is 0 below -87.3, capped above
    88.3, and a NaN for a NaN. It is made by the usual reduction x = n ln 2 + r and the Cephes library's polynomial
    of degree 5."""
    least, most = splat(_LEAST), splat(_MOST)
    inside = where_greater(least, x, least, where_greater(x, most, most, x))
    shifted = fma(inside, splat(_LOG2_E), splat(_ROUND))
    n = shifted - splat(_ROUND)
    r = fma(n, splat(_LN2_LOW), fma(n, splat(_LN2_HIGH), inside))
    p = fma(splat(_C6), r, splat(_C5))
    p = fma(p, r, splat(_C4))
    p = fma(p, r, splat(_C3))
    p = fma(p, r, splat(_C2))
    p = fma(p, r, splat(_C1))
    p = fma(p, r * r, r) + splat(_ONE)
    return where_greater(least, x, splat(_ZERO), _times_power_of_two(p, shifted))
