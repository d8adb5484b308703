"""How the threads of a stage find their work and wait for each other, without the interpreter.

The job queue consists of int64 numbers in shared memory. Numbers that change at different times lie on cache lines
of their own. Behind each number on which threads sleep stands how many do (`atomics.SLEEPERS`).

A job is published by counting up JOBS; its numbers stand in the job queue. At a barrier each thread counts up
ARRIVED and waits until all have. It spins briefly; then it yields its core many times, since a thread that is
awaited may need it; then it sleeps. A thread that finds no job for a while sleeps, too, until one is published.
None of this needs the interpreter, for whose lock a thread that wakes up would have to wait.
"""
# mypy: ignore-errors
# (numba types these functions from their arguments)

from __future__ import annotations

from ppserve.model.compiled.jit import inlined
from ppserve.model.compiled.lanes import load_int, store_int
from ppserve.model.cpu.kernels.atomics import NAP_NS, add_shared, load_shared, pause, sleep_below, wake, yield_core

_NUMBERS_APART = 16
JOBS, ARRIVED, JOB = (i * _NUMBERS_APART for i in range(3))
JOB_NUMBERS = 6
_GOALS = JOB + _NUMBERS_APART
"""Here each thread has two numbers of its own: what ARRIVED will be when all have arrived, and which of its two
counts of pieces is in use. Behind them are these counts: how many pieces of a thread's partition have been taken,
by any thread."""

_SPINS_BEFORE_YIELD = 2_000
_YIELDS_BEFORE_SLEEP = 20_000
_SPINS_BEFORE_SLEEP = 8_000
_MOST_NAP_NS = 100 * NAP_NS


def job_queue_size(num_threads: int) -> int:
    """Return how many numbers a job queue has."""
    return _GOALS + 3 * num_threads * _NUMBERS_APART


@inlined
def barrier(job_queue, thread, num_threads):
    """Wait until all threads are here. What they wrote before is visible afterwards."""
    if num_threads == 1:
        return
    own = _GOALS + thread * _NUMBERS_APART
    goal = load_int(job_queue, own) + num_threads
    store_int(job_queue, own, goal)
    arrived = job_queue + 8 * ARRIVED
    if add_shared(arrived, 1) + 1 == goal:
        wake(arrived)
        return
    for spins in range(_SPINS_BEFORE_YIELD + _YIELDS_BEFORE_SLEEP):
        if load_shared(arrived) >= goal:
            return
        pause()
        if spins >= _SPINS_BEFORE_YIELD:
            # Beside a busy program, sleeping at once costs three times as much (docs/performance.md).
            yield_core()
    while load_shared(arrived) < goal:
        sleep_below(arrived, goal, NAP_NS)


@inlined
def begin_pieces(job_queue, thread, num_threads):
    """Begin a division into pieces, of which none has been taken yet. Return the address of the counts, for
    `next_piece`. All threads call this after a barrier, and another barrier must follow the pieces."""
    own = _GOALS + thread * _NUMBERS_APART
    turn = load_int(job_queue, own + 1)
    store_int(job_queue, own + 1, 1 - turn)
    counts = job_queue + 8 * (_GOALS + num_threads * _NUMBERS_APART)
    # The other counts are for the next division. A barrier has passed since they were in use.
    store_int(counts, (2 * thread + 1 - turn) * _NUMBERS_APART, 0)
    return counts + 8 * turn * _NUMBERS_APART


@inlined
def next_piece(counts, thread):
    """Take the next piece of a thread's partition, and return its number. A thread that is done with its own
    partition takes pieces of a slower thread's."""
    return add_shared(counts + 16 * thread * _NUMBERS_APART, 1)


@inlined
def await_job(job_queue, done):
    """Wait until more jobs than `done` have been published."""
    jobs = job_queue + 8 * JOBS
    for _ in range(_SPINS_BEFORE_SLEEP):
        if load_shared(jobs) != done:
            return
        pause()
    nap_ns = NAP_NS
    while load_shared(jobs) == done:
        sleep_below(jobs, done + 1, nap_ns)
        # The longer there has been no job, the less often the thread looks. Where no thread can wake another, it
        # is late by at most an eighth of that time, and never by more than 5 ms.
        nap_ns = min(nap_ns + nap_ns // 8, _MOST_NAP_NS)


@inlined
def publish(job_queue, job):
    """Publish these numbers as the next job."""
    for i in range(JOB_NUMBERS):
        store_int(job_queue, JOB + i, job[i])
    jobs = job_queue + 8 * JOBS
    add_shared(jobs, 1)
    wake(jobs)
