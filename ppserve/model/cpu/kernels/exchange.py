"""How ranks that share memory give each other their rows.

The memory begins with lines of int64 numbers. Each rank has a line with a counter that only this rank changes. One
line more has a number that is not 0 once the exchange has ended. After the lines, each rank has two buffers.

A rank puts its rows into one of its buffers, then counts up; a rank that sees the new count also sees the rows.
When all have counted up, each copies the rows of all. A rank uses its two buffers in turn. That is safe: no rank
is more than one exchange ahead, so when a buffer is used again, all have read it.

A rank that waits spins for some microseconds, then sleeps, so that another thread has the core. It does not yield:
for Linux, a thread that yields has used up its slice of time, so beside two busy threads it would hardly run
again.
"""
# mypy: ignore-errors
# (numba types these functions from their arguments)

from __future__ import annotations

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ppserve.model.compiled.jit import inlined, kernel
from ppserve.model.compiled.lanes import load_int, store_int
from ppserve.model.compiled.together import for_types
from ppserve.model.cpu.kernels.atomics import (
    NAP_NS,
    add_shared,
    have_news,
    load_shared,
    now_ns,
    pause,
    sleep_below,
    wake,
)

LINE_BYTES = 128
"""The size of each line: two cache lines of the CPU, which fetches them in pairs."""
BUFFER_BYTES = 4 << 20

LINES, RANK, NUM_RANKS, BUFFERS, TURN, WAITED_NS, SIGNS, NUM_SIGNS, IS_LOST = range(9)
"""The numbers of a side, which is what one rank knows of the exchange.

LINES, BUFFERS: addresses. TURN: how many exchanges have been made. WAITED_NS: how long this rank has waited for
others so far. SIGNS, NUM_SIGNS: the address and number of `struct pollfd`, which show when a rank has died.
IS_LOST: 1 once an exchange has failed because a rank was gone; then there are no more exchanges."""
NUM_FIELDS = 9
_SPIN_NS = 50_000
_LOOKS = 16


@intrinsic
def _copy_bytes(typing, to, source, count):
    """Copy bytes from one address to another."""

    def generate(context, builder, signature, arguments):
        to, source = (builder.inttoptr(place, cgutils.voidptr_t) for place in arguments[:2])
        cgutils.raw_memcpy(builder, to, source, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


@kernel
def exchange(side, rows, num_rows, element_bytes, widths, whole) -> None:
    """Put the rows of all ranks side by side at `whole`. If a rank is lost, IS_LOST is set instead. rows: this
    rank's. widths: the address of int64 numbers, which say how many numbers a row of each rank has."""
    if load_int(side, IS_LOST):
        return
    lines, count, turn = load_int(side, LINES), load_int(side, NUM_RANKS), load_int(side, TURN)
    buffers = load_int(side, BUFFERS) + turn % 2 * BUFFER_BYTES
    own_bytes = num_rows * load_int(widths, load_int(side, RANK)) * element_bytes
    _copy_bytes(buffers + 2 * load_int(side, RANK) * BUFFER_BYTES, rows, own_bytes)
    store_int(side, TURN, turn + 1)
    own_line = lines + LINE_BYTES * load_int(side, RANK)
    add_shared(own_line, 1)
    wake(own_line)
    begun_ns, is_lost = now_ns(), False
    for rank in range(count):
        is_lost = is_lost or not _await(side, lines + LINE_BYTES * rank, turn + 1)
    store_int(side, WAITED_NS, load_int(side, WAITED_NS) + now_ns() - begun_ns)
    if is_lost:
        store_int(side, IS_LOST, 1)
        return
    row_bytes = 0
    for rank in range(count):
        row_bytes += load_int(widths, rank) * element_bytes
    for rank in range(count):
        width = load_int(widths, rank) * element_bytes
        for row in range(num_rows):
            _copy_bytes(whole + row * row_bytes, buffers + row * width, width)
        whole, buffers = whole + width, buffers + 2 * BUFFER_BYTES


EXCHANGE = for_types(exchange, "int64, int64, int64, int64, int64, int64")


@inlined
def _await(side, line, goal):
    """Wait until a rank has counted up to `goal`. Return whether it has; False: it never will."""
    begun_ns = now_ns()
    while load_shared(line) < goal and now_ns() - begun_ns < _SPIN_NS:
        for _ in range(_LOOKS):
            pause()
    over = load_int(side, LINES) + LINE_BYTES * load_int(side, NUM_RANKS)
    has_slept = False
    while load_shared(line) < goal:
        if has_slept and have_news(load_int(side, SIGNS), load_int(side, NUM_SIGNS)) > 0:
            add_shared(over, 1)
        if load_shared(over) > 0:
            return load_shared(line) >= goal  # the rank may have counted up before the end
        sleep_below(line, goal, NAP_NS)
        has_slept = True
    return True
