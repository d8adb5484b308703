"""Numbers in memory as float32, bfloat16 or int8, which kernels see as float32."""
# mypy: ignore-errors
# (numba types these functions from their arguments)

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ppserve.model.compiled.lanes import lanes
from ppserve.model.compiled.llvm import F32, I8, I16, I32, constant, splat, vector
from ppserve.model.compiled.settings import setting
from ppserve.model.cpu.kernels.operations import round_to_bfloat16

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


@setting
@dataclass(frozen=True)
class Storage:
    """storage: a key of ELEMENT_BYTES."""

    storage: str

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.storage]


def load_stored(builder, storage: str, address, count: int):
    """<count x float> from an address."""
    element = {"float32": F32, "bfloat16": I16, "int8": I8}[storage]
    place = builder.inttoptr(address, vector(element, count).as_pointer())
    loaded = builder.load(place, align=ELEMENT_BYTES[storage])
    if storage == "float32":
        return loaded
    if storage == "int8":
        return builder.sitofp(builder.sext(loaded, vector(I32, count)), vector(F32, count))
    bits = builder.shl(builder.zext(loaded, vector(I32, count)), constant(I32, count, 16))
    return builder.bitcast(bits, vector(F32, count))


def as_stored(builder, storage: str, value, integer):
    """A float32, or several, in the form of storage; integer: the int32 of the same shape. int8: 1.5 * 2**23 is
    added to what lies within ±127, which leaves it rounded in the low bits."""

    def like(element):
        return vector(element, integer.count) if isinstance(integer, ir.VectorType) else element

    if storage == "float32":
        return value
    if storage == "bfloat16":
        return round_to_bfloat16(builder, value, integer)
    whole = ir.Constant(F32, 1.5 * 2**23)
    shifted = builder.fadd(value, splat(builder, whole, integer.count) if like(F32) is not F32 else whole)
    return builder.trunc(builder.bitcast(shifted, integer), like(I8))


@intrinsic
def keep(typing, kind, address, value):
    """Write one float32, or 16 side by side, in the form of the kind's storage."""

    def generate(context, builder, signature, arguments):
        kind, _, value_type = signature.args
        integer = vector(I32, 16) if value_type is lanes else I32
        stored = as_stored(builder, kind.kind.storage, arguments[2], integer)
        builder.store(stored, builder.inttoptr(arguments[1], stored.type.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(kind, types.intp, lanes if value is lanes else types.float32), generate


def _reading(value_type, count: int):
    """An intrinsic that reads so many numbers as float32, without the scale of int8."""

    def read(typing, kind, address):
        def generate(context, builder, signature, arguments):
            value = load_stored(builder, signature.args[0].kind.storage, arguments[1], count)
            return builder.extract_element(value, I32(0)) if count == 1 else value

        return value_type(kind, types.intp), generate

    return intrinsic(read)


read_one, read_panel = _reading(types.float32, 1), _reading(lanes, 16)
