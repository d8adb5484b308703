"""int64 numbers that threads share, by address, and two ways to let time pass."""
# mypy: ignore-errors
# (numba types these functions from their arguments; mypy cannot see through its intrinsics)

from __future__ import annotations

import platform

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ppserve.model.compiled.llvm import I32, I64, call

_IS_X86 = platform.machine() in ("x86_64", "AMD64")


def _number(builder, address):
    return builder.inttoptr(address, I64.as_pointer())


@intrinsic
def load_shared(typing, address):
    """The number; what another thread wrote before it changed the number is visible afterwards."""

    def generate(context, builder, signature, arguments):
        return builder.load_atomic(_number(builder, *arguments), "seq_cst", 8)

    return types.int64(types.intp), generate


@intrinsic
def add_shared(typing, address, value):
    """Adds to the number, and gives what it was; what this thread wrote before is visible to those who see the
    change."""

    def generate(context, builder, signature, arguments):
        address, value = arguments
        return builder.atomic_rmw("add", _number(builder, address), value, "seq_cst")

    return types.int64(types.intp, types.int64), generate


@intrinsic
def pause(typing):
    """A moment: tells the CPU that this thread is waiting."""

    def generate(context, builder, signature, arguments):
        if _IS_X86:
            call(builder, "llvm.x86.sse2.pause", ir.VoidType())
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def yield_core(typing):
    """Lets the system run another thread on this core, if one is waiting."""

    def generate(context, builder, signature, arguments):
        call(builder, "sched_yield", I32)
        return context.get_dummy_value()

    return types.void(), generate
