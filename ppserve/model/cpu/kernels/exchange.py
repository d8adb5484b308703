"""How ranks that share memory give each other their rows.

Each rank has a counter in the shared memory, an int64 on cache lines of its own, that only it changes. A rank
copies its rows into the shared memory, then counts up. Whoever sees the new count also sees the rows. When all
ranks have counted up, each copies the rows of all.
"""
# mypy: ignore-errors
# (numba types these functions from their arguments; mypy cannot see through its intrinsics)

from __future__ import annotations

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ppserve.model.compiled.jit import kernel
from ppserve.model.compiled.lanes import load_int
from ppserve.model.cpu.kernels.atomics import add_shared, load_shared, pause, yield_core

LINE_BYTES = 128
"""Of a counter: two lines, because CPUs fetch them in pairs."""
_SPINS, _YIELDS = 1_000, 100


@intrinsic
def _copy_bytes(typing, to, source, count):
    """From one address to another."""

    def generate(context, builder, signature, arguments):
        to, source = (builder.inttoptr(place, cgutils.voidptr_t) for place in arguments[:2])
        cgutils.raw_memcpy(builder, to, source, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


@kernel
def put(board, rank, room, rows, num_bytes) -> None:
    """Copies rows to the rank's room, then counts up."""
    _copy_bytes(room, rows, num_bytes)
    add_shared(board + LINE_BYTES * rank, 1)


@kernel
def take(rooms, apart, widths, count, num_rows, whole) -> None:
    """Rows of all ranks next to each other. rooms: the first rank's, those of the others `apart` bytes further.
    widths: the address of the bytes that a row of each rank has. whole: where the rows go."""
    row_bytes = 0
    for rank in range(count):
        row_bytes += load_int(widths, rank)
    for rank in range(count):
        width = load_int(widths, rank)
        for row in range(num_rows):
            _copy_bytes(whole + row * row_bytes, rooms + row * width, width)
        whole, rooms = whole + width, rooms + apart


@kernel
def await_ranks(board, count, goal) -> bool:
    """Whether the counters of all ranks have reached `goal`; looks for some microseconds, then lets other threads
    of this core run for some more, and gives up."""
    for spin in range(_SPINS + _YIELDS):
        here = 0
        while here < count and load_shared(board + LINE_BYTES * here) >= goal:
            here += 1
        if here == count:
            return True
        if spin < _SPINS:
            pause()
        else:
            yield_core()
    return False
