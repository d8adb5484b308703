"""The threads of a stage, which compute each job together. They wait for jobs: they spin briefly, then sleep.

The order of sums is not decided here, so no bit depends on the number of threads.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppserve.model.cpu.kernels.job_queue import JOB_NUMBERS, job_queue_size
from ppserve.model.cpu.kernels.memory import address, aligned

Work = Callable[..., None]
"""What each thread runs. It takes the job queue's address, the thread's number, the number of threads, and the
numbers of a job.

Thread 0 publishes a job and does its part of it. The others do their parts of job after job, until a job of zeros
ends them. All threads wait for each other at a job's end, so none misses the next."""

_NO_JOB = (0,) * JOB_NUMBERS


class ThreadPool:
    """The threads that compute together, the calling thread included.

    work: a kernel that holds the interpreter lock no longer than it takes to call it.
    """

    def __init__(self, num_threads: int, work: Work) -> None:
        self.num_threads = num_threads
        self._work = work
        self._job_queue = aligned(job_queue_size(num_threads), np.int64)
        self._address = address(self._job_queue)
        self._calls = threading.Lock()
        own = (self._job_queue, work, num_threads)
        threads = [
            threading.Thread(target=_serve, args=(*own, number), name=f"kernel {number}", daemon=True)
            for number in range(1, num_threads)
        ]
        for thread in threads:
            thread.start()
        self._end = weakref.finalize(self, _serve, *own, 0)

    def run(self, *job: int) -> None:
        """Do a job, given as JOB_NUMBERS numbers. Return when it is done. Concurrent calls are done one after the
        other."""
        with self._calls:
            self._work(self._address, 0, self.num_threads, *job)

    def close(self) -> None:
        """End the threads."""
        self._end()


def _serve(job_queue: NDArray[Any], work: Work, num_threads: int, thread: int) -> None:
    """Run one thread. Its arguments keep the job queue alive as long as the thread uses it. Called as thread 0, it
    ends the others."""
    work(address(job_queue), thread, num_threads, *_NO_JOB)
