"""Numbers that are stored as float32, bfloat16 or int8, and which kernels load and store as float32."""
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
    """How numbers are stored. storage: a key of ELEMENT_BYTES."""

    storage: str

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.storage]


def load_stored(builder, storage: str, address, count: int):
    """Load <count x float> from an address."""
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
    """Convert one float32 or several to the form in which they are stored. integer: the type int32 of the same
    shape. For int8 the values lie within ±127: adding 1.5 * 2**23 leaves them, rounded, in the low bits."""

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
    """Store one float32, or 16 side by side, in the form of the kind's storage."""

    def generate(context, builder, signature, arguments):
        kind, _, value_type = signature.args
        integer = vector(I32, 16) if value_type is lanes else I32
        stored = as_stored(builder, kind.kind.storage, arguments[2], integer)
        builder.store(stored, builder.inttoptr(arguments[1], stored.type.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(kind, types.intp, lanes if value is lanes else types.float32), generate


def _reading(value_type, count: int):
    """Return an intrinsic that loads `count` numbers as float32. Numbers of int8 are not multiplied by their
    scale."""

    def read(typing, kind, address):
        def generate(context, builder, signature, arguments):
            value = load_stored(builder, signature.args[0].kind.storage, arguments[1], count)
            return builder.extract_element(value, I32(0)) if count == 1 else value

        return value_type(kind, types.intp), generate

    return intrinsic(read)


read_one, read_panel = _reading(types.float32, 1), _reading(lanes, 16)
