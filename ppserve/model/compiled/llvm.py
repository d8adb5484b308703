"""LLVM's types, and short ways to write the code that intrinsics consist of."""
# mypy: ignore-errors
# (LLVM values have no types that mypy could check)

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils

I8, I16, I32, I64, F32 = (*(ir.IntType(bits) for bits in (8, 16, 32, 64)), ir.FloatType())
vector = ir.VectorType


def call(builder, name: str, kind: ir.Type, *arguments):
    """A call of one of LLVM's intrinsics."""
    function_type = ir.FunctionType(kind, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), arguments)


def constant(kind: ir.Type, lanes: int, value: int):
    return ir.Constant(vector(kind, lanes), [value] * lanes)


def shuffle(builder, value, indices: list[int]):
    mask = ir.Constant(vector(I32, len(indices)), indices)
    return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), mask)


def splat(builder, scalar, lanes: int):
    first = builder.insert_element(ir.Constant(vector(scalar.type, lanes), ir.Undefined), scalar, I32(0))
    return shuffle(builder, first, [0] * lanes)
