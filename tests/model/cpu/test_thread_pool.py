"""The threads of a stage: each job is done once by each, and those that went to sleep are woken."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ppserve.model.compiled.jit import kernel
from ppserve.model.compiled.lanes import load_int, store_int
from ppserve.model.cpu.kernels.atomics import SLEEPERS
from ppserve.model.cpu.kernels.job_queue import (
    ARRIVED,
    JOB,
    JOBS,
    await_job,
    barrier,
    job_queue_size,
    publish,
)
from ppserve.model.cpu.kernels.memory import address, aligned
from ppserve.model.cpu.thread_pool import ThreadPool


@kernel
def count_in_turns(job_queue, thread, num_threads, *job) -> None:  # type: ignore[no-untyped-def]
    """A job has an address and a number of rounds. In each round every thread adds to its number the round and
    what its neighbour had before the round; so a thread that does not wait for the others shows."""
    done = 0
    if thread == 0:
        publish(job_queue, job)
    while True:
        if thread > 0:
            await_job(job_queue, done)
            done += 1
        place, rounds = load_int(job_queue, JOB), load_int(job_queue, JOB + 1)
        if place == 0:
            return
        for step in range(rounds):
            neighbour = load_int(place, 16 * ((thread + 1) % num_threads))
            barrier(job_queue, thread, num_threads)
            own = load_int(place, 16 * thread)
            store_int(place, 16 * thread, own + neighbour % 7 + step)
            barrier(job_queue, thread, num_threads)
        barrier(job_queue, thread, num_threads)
        if thread == 0:
            return


def expected(num_threads: int, rounds: list[int]) -> list[int]:
    numbers = list(range(num_threads))
    for count in rounds:
        for step in range(count):
            numbers = [n + numbers[(t + 1) % num_threads] % 7 + step for t, n in enumerate(numbers)]
    return numbers


@kernel
def wait_once(job_queue, thread, num_threads) -> None:  # type: ignore[no-untyped-def]
    barrier(job_queue, thread, num_threads)


def test_a_thread_that_waits_long_sleeps_and_is_woken() -> None:
    job_queue = aligned(job_queue_size(3), np.int64)
    wait_once(address(job_queue), 0, 1)  # compiles
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(wait_once, address(job_queue), thread, 3) for thread in (1, 2)]
        until_s = time.monotonic() + 100
        while (num_asleep := job_queue[ARRIVED + SLEEPERS]) < 2 and time.monotonic() < until_s:
            time.sleep(1e-3)
        is_over = [each.done() for each in waiting]
        wait_once(address(job_queue), 0, 3)
        for each in waiting:
            each.result(60)
    assert is_over == [False, False]
    assert num_asleep == 2, "no thread was woken: in 100 s not both slept"
    assert job_queue[ARRIVED + SLEEPERS] == 0


def run(thread_pool: ThreadPool, numbers: np.ndarray, rounds: int) -> None:
    thread_pool.run(address(numbers), rounds, 0, 0, 0, 0)


def asleep(thread_pool: ThreadPool) -> None:
    """Returns when all threads but the calling one are."""
    while thread_pool._job_queue[JOBS + SLEEPERS] < thread_pool.num_threads - 1:
        threading.Event().wait(0.001)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_threads_do_jobs_together_asleep_or_not(num_threads: int) -> None:
    thread_pool = ThreadPool(num_threads, count_in_turns)
    numbers = aligned(16 * num_threads, np.int64)
    numbers[::16] = range(num_threads)
    rounds = [1, 40, 0, 7, 200, 3]
    for position, count in enumerate(rounds):
        if position % 2:
            asleep(thread_pool)
        run(thread_pool, numbers, count)
    assert numbers[::16].tolist() == expected(num_threads, rounds)
    thread_pool.close()


def test_callers_wait_for_each_other() -> None:
    thread_pool = ThreadPool(2, count_in_turns)
    places = [aligned(32, np.int64) for _ in range(4)]
    for place in places:
        place[16] = 1

    def call(place: np.ndarray) -> None:
        for _ in range(20):
            run(thread_pool, place, 5)

    callers = [threading.Thread(target=call, args=(place,)) for place in places]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(place[::16].tolist() == expected(2, [5] * 20) for place in places)
    thread_pool.close()


@pytest.mark.parametrize("forgotten", [False, True])
def test_threads_end_with_their_pool(forgotten: bool) -> None:
    before = set(threading.enumerate())
    thread_pool = ThreadPool(3, count_in_turns)
    own = set(threading.enumerate()) - before
    assert len(own) == 2
    if forgotten:
        del thread_pool
        gc.collect()
    else:
        thread_pool.close()
    for thread in own:
        thread.join(timeout=30)
        assert not thread.is_alive()
