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
from ppserve.model.cpu.backend import CpuBackend
from ppserve.model.cpu.kernels.atomics import SLEEPERS
from ppserve.model.cpu.kernels.board import ARGUMENTS, ARRIVED, JOBS, LOST, await_job, board_size, meet
from ppserve.model.cpu.kernels.exchange import NUM_FIELDS
from ppserve.model.cpu.kernels.memory import address, aligned
from ppserve.model.cpu.kernels.work import COMPLETE, GATHER, as_table, jobs_of
from ppserve.model.cpu.team import Team, _publish


@kernel
def count_in_turns(board, thread, num_threads) -> None:  # type: ignore[no-untyped-def]
    """A job has an address and a number of rounds. In each round every thread adds to its number the round and
    what its neighbour had before the round; so a thread that does not wait for the others shows."""
    done = 0
    while True:
        if thread > 0:
            await_job(board, done)
            done += 1
        place, rounds = load_int(board, ARGUMENTS), load_int(board, ARGUMENTS + 1)
        if place == 0:
            return
        for step in range(rounds):
            neighbour = load_int(place, 16 * ((thread + 1) % num_threads))
            meet(board, thread, num_threads)
            own = load_int(place, 16 * thread)
            store_int(place, 16 * thread, own + neighbour % 7 + step)
            meet(board, thread, num_threads)
        meet(board, thread, num_threads)
        if thread == 0:
            return


def expected(num_threads: int, rounds: list[int]) -> list[int]:
    numbers = list(range(num_threads))
    for count in rounds:
        for step in range(count):
            numbers = [n + numbers[(t + 1) % num_threads] % 7 + step for t, n in enumerate(numbers)]
    return numbers


@kernel
def meet_once(board, thread, num_threads) -> None:  # type: ignore[no-untyped-def]
    meet(board, thread, num_threads)


def test_who_waits_long_for_another_thread_sleeps_and_is_woken() -> None:
    board = aligned(board_size(3), np.int64)
    meet_once(address(board), 0, 1)  # compiles
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(meet_once, address(board), thread, 3) for thread in (1, 2)]
        until_s = time.monotonic() + 20
        while (num_asleep := board[ARRIVED + SLEEPERS]) < 2 and time.monotonic() < until_s:
            time.sleep(1e-3)
        is_over = [each.done() for each in waiting]
        meet_once(address(board), 0, 3)
        for each in waiting:
            each.result(60)
    assert board[ARRIVED + SLEEPERS] == 0
    assert is_over == [False, False]
    if num_asleep < 2:
        pytest.skip("no core to spare: a thread yields to other programs 20,000 times before it sleeps")


def test_a_late_thread_does_not_look_at_the_side_of_an_exchange_that_is_gone() -> None:
    """Thread 0 is this test: it has the rows of other ranks lost, returns, and its side's memory is another's."""
    work, board = CpuBackend("float32")._team._work, aligned(board_size(2), np.int64)
    widths, side = as_table((1, 1)), aligned(NUM_FIELDS, np.int64)
    jobs = jobs_of((GATHER, widths), (COMPLETE, widths))
    late = threading.Thread(target=work, args=(address(board), 1, 2), daemon=True)
    _publish(board, (address(jobs), 2, 0, 0, 0, 0, address(side)))
    late.start()
    while board[ARRIVED] < 1:
        threading.Event().wait(0.001)
    board[LOST] = 1
    board[ARRIVED] += 1
    _publish(board, ())
    late.join(timeout=30)
    assert not late.is_alive()  # with the other job it would wait for a thread that does not come


def board_of(team: Team) -> np.ndarray:
    return team._board


def asleep(team: Team) -> None:
    """Returns when all threads but the calling one are."""
    while board_of(team)[JOBS + SLEEPERS] < team.num_threads - 1:
        threading.Event().wait(0.001)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_threads_do_jobs_together_asleep_or_not(num_threads: int) -> None:
    team = Team(num_threads, count_in_turns)
    numbers = aligned(16 * num_threads, np.int64)
    numbers[::16] = range(num_threads)
    rounds = [1, 40, 0, 7, 200, 3]
    for position, count in enumerate(rounds):
        if position % 2:
            asleep(team)
        team.run(address(numbers), count)
    assert numbers[::16].tolist() == expected(num_threads, rounds)
    team.close()


def test_callers_wait_for_each_other() -> None:
    team = Team(2, count_in_turns)
    places = [aligned(32, np.int64) for _ in range(4)]
    for place in places:
        place[16] = 1

    def call(place: np.ndarray) -> None:
        for _ in range(20):
            team.run(address(place), 5)

    callers = [threading.Thread(target=call, args=(place,)) for place in places]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(place[::16].tolist() == expected(2, [5] * 20) for place in places)
    team.close()


@pytest.mark.parametrize("forgotten", [False, True])
def test_threads_end_with_their_team(forgotten: bool) -> None:
    before = set(threading.enumerate())
    team = Team(3, count_in_turns)
    own = set(threading.enumerate()) - before
    assert len(own) == 2
    if forgotten:
        del team
        gc.collect()
    else:
        team.close()
    for thread in own:
        thread.join(timeout=30)
        assert not thread.is_alive()
