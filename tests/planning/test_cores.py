"""Cores that several take from each other."""

from __future__ import annotations

from ppserve.planning.cores import Cores, SharedCores


def test_a_rank_takes_the_core_that_is_free_first() -> None:
    cores = Cores(SharedCores(2, (0, 1, 2)))
    assert [cores.take(0.5, seconds).ended_s for seconds in (3.0, 1.0, 1.0, 1.0)] == [3.5, 1.5, 2.5, 3.5]
    assert cores.take(10.0, 1.0).ended_s == 11.0


def test_whoever_comes_for_short_delays_nobody_where_a_core_is_idle() -> None:
    cores = Cores(SharedCores(2, (0,)))
    turn = cores.take(0.0, 1.0)
    cores.interrupt(0.5, 0.25)
    assert turn.ended_s == 1.0


def test_and_elsewhere_whoever_would_end_first_and_all_who_wait_for_that_core() -> None:
    cores = Cores(SharedCores(2, (0, 1, 2)))
    first, second, waiting = (cores.take(0.0, seconds) for seconds in (2.0, 4.0, 1.0))
    cores.interrupt(1.0, 0.5)
    assert (first.ended_s, waiting.ended_s, second.ended_s) == (2.5, 3.5, 4.0)
    cores.interrupt(3.0, 0.5)
    assert (first.ended_s, waiting.ended_s, second.ended_s) == (2.5, 4.0, 4.0), "the first had ended"


def test_cores_are_scarce_where_none_is_left() -> None:
    assert SharedCores(2, (0, 1)).are_scarce
    assert SharedCores(4, (0, 1), threads=2).are_scarce
    assert not SharedCores(3, (0, 1)).are_scarce
