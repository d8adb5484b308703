"""What kernels ask the operating system for: the time, which core this is, sleep, and whether a file has news."""
# mypy: ignore-errors
# (numba types these functions from their arguments; mypy cannot see through its intrinsics)

from __future__ import annotations

import platform
import sys
import time

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ppserve.model.compiled.llvm import I32, I64, call

_IS_LINUX = sys.platform == "linux"
# The number of the system call; elsewhere threads sleep for a while and look again.
_FUTEX_OF = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "loongarch64": 98, "ppc64le": 221}
_FUTEX = _FUTEX_OF.get(platform.machine()) if _IS_LINUX else None
_FUTEX_WAIT, _FUTEX_WAKE, _EVERYBODY = 0, 1, 0x7FFFFFFF
NAP_NS = 10_000_000 if _FUTEX is not None else 50_000
"""How long to sleep at a time; the short one where nobody can wake us."""
_SECOND_NS = 1_000_000_000


@intrinsic
def now_ns(typing):
    """As `time.monotonic_ns`."""

    def generate(context, builder, signature, arguments):
        place = cgutils.alloca_once(builder, ir.ArrayType(I64, 2))
        call(builder, "clock_gettime", I32, I32(time.CLOCK_MONOTONIC), place)
        seconds, ns = (builder.load(builder.gep(place, [I32(0), I32(i)])) for i in range(2))
        return builder.add(builder.mul(seconds, I64(_SECOND_NS)), ns)

    return types.int64(), generate


@intrinsic
def core_here(typing):
    """One more than the number of the core; 0 where the system does not say."""

    def generate(context, builder, signature, arguments):
        if not _IS_LINUX:
            return I64(0)
        return builder.sext(builder.add(call(builder, "sched_getcpu", I32), I32(1)), I64)

    return types.int64(), generate


@intrinsic
def sleep_while(typing, address, value, most_ns):
    """Until the number at this address is another one and somebody calls `wake_all`, or for so long. Processes
    that share memory can wake each other."""

    def generate(context, builder, signature, arguments):
        address, value, most_ns = arguments
        if _FUTEX is not None:
            most = cgutils.alloca_once(builder, ir.ArrayType(I64, 2))
            for i, part in enumerate((builder.udiv, builder.urem)):
                builder.store(part(most_ns, I64(_SECOND_NS)), builder.gep(most, [I32(0), I32(i)]))
            most = builder.ptrtoint(most, I64)
            # It compares the number's low half, which comes first.
            call(builder, "syscall", I64, I64(_FUTEX), address, I64(_FUTEX_WAIT), value, most, I64(0), I64(0))
        else:
            call(builder, "usleep", I32, builder.trunc(builder.udiv(most_ns, I64(1000)), I32))
        return context.get_dummy_value()

    return types.void(types.intp, types.int64, types.int64), generate


@intrinsic
def wake_all(typing, address):
    """Those who sleep while the number at this address stays."""

    def generate(context, builder, signature, arguments):
        if _FUTEX is not None:
            many = I64(_EVERYBODY)
            call(builder, "syscall", I64, I64(_FUTEX), *arguments, I64(_FUTEX_WAKE), many, I64(0), I64(0), I64(0))
        return context.get_dummy_value()

    return types.void(types.intp), generate


@intrinsic
def have_news(typing, files, count):
    """How many of so many `struct pollfd` there is something of."""

    def generate(context, builder, signature, arguments):
        files, count = arguments
        return builder.sext(call(builder, "poll", I32, files, count, I32(0)), I64)

    return types.int64(types.intp, types.int64), generate
