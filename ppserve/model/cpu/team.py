"""The threads of a stage: they wait for jobs by spinning briefly, then asleep, and compute each job together.

Nothing here decides what is added to what, so no bit depends on the number of threads.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppserve.model.cpu.kernels.board import ARGUMENTS, MOST_ARGUMENTS, board_size, publish
from ppserve.model.cpu.kernels.memory import address, aligned

Work = Callable[[int, int, int], None]
"""What each thread runs: (board, its number, number of threads).

Thread 0 does its part of the one published job. The others do their parts of job after job, until one without
arguments tells them to end. At the end of a job all threads wait for each other, so none can miss the next."""


class Team:
    """num_threads: how many compute at once, the calling thread included. work: a kernel that holds the
    interpreter lock no longer than it takes to call it."""

    def __init__(self, num_threads: int, work: Work) -> None:
        self.num_threads = num_threads
        self._work = work
        self._board = aligned(board_size(num_threads), np.int64)
        self._place = address(self._board)
        self._calls = threading.Lock()
        own = (self._board, work, num_threads)
        threads = [
            threading.Thread(target=_serve, args=(*own, number), name=f"kernel {number}", daemon=True)
            for number in range(1, num_threads)
        ]
        for thread in threads:
            thread.start()
        self._end = weakref.finalize(self, _publish, self._board, ())

    def run(self, *arguments: int) -> None:
        """Have a job done; returns when it is. Calls of several threads follow each other."""
        with self._calls:
            _publish(self._board, arguments)
            self._work(self._place, 0, self.num_threads)

    def close(self) -> None:
        """Ends the threads."""
        self._end()


def _publish(board: NDArray[Any], arguments: Sequence[int]) -> None:
    assert len(arguments) <= MOST_ARGUMENTS
    board[ARGUMENTS : ARGUMENTS + MOST_ARGUMENTS] = 0  # also those that the job before had and this one has not
    board[ARGUMENTS : ARGUMENTS + len(arguments)] = arguments
    publish(address(board))


def _serve(board: NDArray[Any], work: Work, num_threads: int, thread: int) -> None:
    """Keeps the board as long as this thread looks at it."""
    work(address(board), thread, num_threads)
