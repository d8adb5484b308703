"""int64 numbers that threads share, by address, and how to wait until one changes."""
# mypy: ignore-errors
# (numba types these functions from their arguments; mypy cannot see through its intrinsics)

from __future__ import annotations

import platform

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ppserve.model.compiled.jit import inlined
from ppserve.model.compiled.llvm import I32, I64, call
from ppserve.model.cpu.kernels.system import sleep_while, wake_all

_IS_X86 = platform.machine() in ("x86_64", "AMD64")

SLEEPERS = 8
"""So many numbers behind one that threads sleep on it says how many do."""


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


@inlined
def sleep_below(number, goal, most_ns):
    """Unless the number is at its goal: until it changes and somebody calls `wake`, or for so long."""
    # Whoever changes it from here on sees that somebody sleeps, or is seen to have changed it.
    add_shared(number + 8 * SLEEPERS, 1)
    value = load_shared(number)
    if value < goal:
        sleep_while(number, value, most_ns)
    add_shared(number + 8 * SLEEPERS, -1)


@inlined
def wake(number):
    """Those who sleep, once the number has changed."""
    if load_shared(number + 8 * SLEEPERS) > 0:
        wake_all(number)
