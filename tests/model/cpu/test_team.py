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
from ppserve.model.cpu.kernels.board import ARGUMENTS, ASLEEP, WAITING, await_job, board_size, meet
from ppserve.model.cpu.kernels.memory import address, aligned
from ppserve.model.cpu.team import Team


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
        while board[WAITING] < 2 and time.monotonic() < until_s:
            time.sleep(1e-3)
        num_asleep, is_over = board[WAITING], [each.done() for each in waiting]
        meet_once(address(board), 0, 3)
        for each in waiting:
            each.result(60)
    assert board[WAITING] == 0
    assert is_over == [False, False]
    if num_asleep < 2:
        pytest.skip("no core to spare: a thread yields to other programs 20,000 times before it sleeps")


def board_of(team: Team) -> np.ndarray:
    return team._board


def asleep(team: Team) -> None:
    """Returns when all threads but the calling one are."""
    while board_of(team)[ASLEEP] < team.num_threads - 1:
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
