"""int64 numbers at addresses that threads and processes share, and how threads wait for one to change."""
# mypy: ignore-errors
# (numba types these functions from their arguments)

from __future__ import annotations

import platform
import sys
import time

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ppserve.model.compiled.jit import inlined
from ppserve.model.compiled.llvm import I32, I64, call

_IS_X86 = platform.machine() in ("x86_64", "AMD64")
_IS_LINUX = sys.platform == "linux"
# The number of Linux's system call `futex`. Without it, threads sleep for a while and look again.
_FUTEX_OF = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "loongarch64": 98, "ppc64le": 221}
_FUTEX = _FUTEX_OF.get(platform.machine()) if _IS_LINUX else None
_FUTEX_WAIT, _FUTEX_WAKE, _ALL = 0, 1, 0x7FFFFFFF
NAP_NS = 10_000_000 if _FUTEX is not None else 50_000
"""How long a thread sleeps at a time. It is short where no thread can wake another."""
_SECOND_NS = 1_000_000_000


SLEEPERS = 8
"""A number on which threads sleep has a second one, so many numbers behind it: how many threads sleep on it."""


def _number(builder, address):
    return builder.inttoptr(address, I64.as_pointer())


@intrinsic
def load_shared(typing, address):
    """Return the number. What another thread wrote before it changed the number is visible afterwards."""

    def generate(context, builder, signature, arguments):
        return builder.load_atomic(_number(builder, *arguments), "seq_cst", 8)

    return types.int64(types.intp), generate


@intrinsic
def add_shared(typing, address, value):
    """Add to the number, and return what it was. A thread that sees the change sees what this one wrote before."""

    def generate(context, builder, signature, arguments):
        address, value = arguments
        return builder.atomic_rmw("add", _number(builder, address), value, "seq_cst")

    return types.int64(types.intp, types.int64), generate


@intrinsic
def now_ns(typing):
    """Return the same as `time.monotonic_ns`."""

    def generate(context, builder, signature, arguments):
        place = cgutils.alloca_once(builder, ir.ArrayType(I64, 2))
        call(builder, "clock_gettime", I32, I32(time.CLOCK_MONOTONIC), place)
        seconds, ns = (builder.load(builder.gep(place, [I32(0), I32(i)])) for i in range(2))
        return builder.add(builder.mul(seconds, I64(_SECOND_NS)), ns)

    return types.int64(), generate


@intrinsic
def sleep_while(typing, address, value, most_ns):
    """Sleep while the number at this address has this value, until `wake_all` is called for it, or for `most_ns`.
    Processes that share memory can wake each other. Where there is no futex, this sleeps for `most_ns`."""

    def generate(context, builder, signature, arguments):
        address, value, most_ns = arguments
        if _FUTEX is not None:
            most = cgutils.alloca_once(builder, ir.ArrayType(I64, 2))
            for i, part in enumerate((builder.udiv, builder.urem)):
                builder.store(part(most_ns, I64(_SECOND_NS)), builder.gep(most, [I32(0), I32(i)]))
            most = builder.ptrtoint(most, I64)
            # The futex compares the number's low half, which comes first in memory.
            call(builder, "syscall", I64, I64(_FUTEX), address, I64(_FUTEX_WAIT), value, most, I64(0), I64(0))
        else:
            call(builder, "usleep", I32, builder.trunc(builder.udiv(most_ns, I64(1000)), I32))
        return context.get_dummy_value()

    return types.void(types.intp, types.int64, types.int64), generate


@intrinsic
def wake_all(typing, address):
    """Wake all threads that sleep on the number at this address."""

    def generate(context, builder, signature, arguments):
        if _FUTEX is not None:
            many = I64(_ALL)
            call(builder, "syscall", I64, I64(_FUTEX), *arguments, I64(_FUTEX_WAKE), many, I64(0), I64(0), I64(0))
        return context.get_dummy_value()

    return types.void(types.intp), generate


@intrinsic
def have_news(typing, files, count):
    """Return how many of the `count` files, given as `struct pollfd`, have something to read or have ended."""

    def generate(context, builder, signature, arguments):
        files, count = arguments
        return builder.sext(call(builder, "poll", I32, files, count, I32(0)), I64)

    return types.int64(types.intp, types.int64), generate


@intrinsic
def pause(typing):
    """Tell the CPU that this thread spins, and wait for a moment."""

    def generate(context, builder, signature, arguments):
        if _IS_X86:
            call(builder, "llvm.x86.sse2.pause", ir.VoidType())
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def yield_core(typing):
    """Let the system run another thread on this core, if one is waiting for it."""

    def generate(context, builder, signature, arguments):
        call(builder, "sched_yield", I32)
        return context.get_dummy_value()

    return types.void(), generate


@inlined
def sleep_below(number, goal, most_ns):
    """Sleep unless the number has reached its goal: until it changes and `wake` is called, or for `most_ns`."""
    # A thread that changes the number from here on sees the sleeper, or the sleeper sees the change.
    add_shared(number + 8 * SLEEPERS, 1)
    value = load_shared(number)
    if value < goal:
        sleep_while(number, value, most_ns)
    add_shared(number + 8 * SLEEPERS, -1)


@inlined
def wake(number):
    """Wake all threads that sleep on this number. Call it after the number has changed."""
    if load_shared(number + 8 * SLEEPERS) > 0:
        wake_all(number)
