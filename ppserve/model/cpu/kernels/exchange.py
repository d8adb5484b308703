"""How ranks that share memory wait for each other: each counts up its own number, and looks at the others'.

The numbers are int64, on cache lines of their own. What a rank wrote before it counted is visible to those who see
the count.
"""
# mypy: ignore-errors
# (numba types these functions from their arguments; mypy cannot see through its intrinsics)

from __future__ import annotations

from ppserve.model.cpu.jit import kernel
from ppserve.model.cpu.kernels.atomics import add_shared, load_shared, pause, yield_core

LINE_BYTES = 128
"""Of a number: two lines, because CPUs fetch them in pairs."""
_SPINS, _YIELDS = 1_000, 100


@kernel
def arrive(board, rank) -> None:
    """This rank's number goes up by one."""
    add_shared(board + LINE_BYTES * rank, 1)


@kernel
def await_ranks(board, count, goal) -> bool:
    """Whether the numbers of all ranks have reached `goal`; looks for some microseconds, then lets other threads
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
