"""LLVM's types, and short ways to write the code that intrinsics consist of."""
# mypy: ignore-errors
# (LLVM values have no types that mypy could check)

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils

I8, I16, I32, I64, F32 = (*(ir.IntType(bits) for bits in (8, 16, 32, 64)), ir.FloatType())
vector = ir.VectorType


def call(builder, name: str, kind: ir.Type, *arguments):
    """Emit a call of one of LLVM's intrinsics, or of a C function."""
    function_type = ir.FunctionType(kind, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), arguments)


def constant(kind: ir.Type, lanes: int, value: int):
    """Return a vector with this number in every lane."""
    return ir.Constant(vector(kind, lanes), [value] * lanes)


def shuffle(builder, value, indices: list[int]):
    """Emit a vector of the lanes of `value` that the indices name."""
    mask = ir.Constant(vector(I32, len(indices)), indices)
    return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), mask)


def splat(builder, scalar, lanes: int):
    """Emit a vector with this scalar in every lane."""
    first = builder.insert_element(ir.Constant(vector(scalar.type, lanes), ir.Undefined), scalar, I32(0))
    return shuffle(builder, first, [0] * lanes)
