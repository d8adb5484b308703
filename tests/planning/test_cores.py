"""Cores that several take from each other."""

from __future__ import annotations

import pytest

from ppserve.planning.cores import Cores, SharedCores, Turn

MS = 1e-3


def ends(*turns: Turn) -> list[float]:
    """In milliseconds."""
    return [round(turn.ended_s / MS, 6) for turn in turns]


def test_whoever_comes_takes_a_core_that_has_nothing_to_do() -> None:
    cores = Cores(SharedCores(2, (0, 1)))
    first, second = cores.take(5 * MS, 3 * MS), cores.take(6 * MS, 1 * MS)
    assert ends(first, second) == [8, 7]
    assert {first.core, second.core} == {0, 1}
    assert ends(cores.take(10 * MS, 1 * MS)) == [11]


def test_its_last_one_if_that_has_nothing_to_do_either() -> None:
    cores = Cores(SharedCores(3, (0, 1, 2)))
    for core in (2, 1, 0):
        assert cores.take(0.0, 1 * MS, Turn(-1.0, core=core)).core == core
    assert [cores.take(2 * MS, 1 * MS, Turn(1 * MS, core=1)).core for _ in range(2)] == [1, 0]


def test_who_waits_has_its_slice_when_that_of_another_has_ended() -> None:
    """Of 1.4 ms on two cores, and whoever has had one waits again."""
    cores = Cores(SharedCores(2, (0, 1, 2)))
    long, other = cores.take(0.0, 3 * MS), cores.take(0.0, 9 * MS)
    waits = cores.take(0.2 * MS, 2 * MS, Turn(0.0, core=long.core))
    assert ends(long, waits, other) == [5, 4.8, 9]
    assert round(waits.began_s / MS, 6) == 1.4
    short = cores.take(4.9 * MS, 0.5 * MS, waits)
    assert ends(short, long) == [5.5, 5]


def test_slices_are_longer_on_more_cores() -> None:
    for num_cores, slice_ms in ((1, 0.7), (2, 1.4), (4, 2.1), (8, 2.8), (64, 2.8)):
        cores = Cores(SharedCores(num_cores, (0,)))
        turns = [cores.take(0.0, 9 * MS, Turn(-1.0, core=core)) for core in (*range(num_cores), 0)]
        assert turns[-1].began_s == pytest.approx(slice_ms * MS)


def test_who_goes_on_keeps_its_core_and_what_is_left_of_its_slice() -> None:
    cores = Cores(SharedCores(1, (0, 1)))
    first = cores.take(0.0, 0.4 * MS)
    other = cores.take(0.1 * MS, 0.5 * MS)
    assert ends(first, other) == [0.4, 0.9]
    more = cores.take(first.ended_s, 1 * MS, first)
    assert ends(more, other) == [1.9, 1.2]
    later = cores.take(2 * MS, 0.0, more)
    assert ends(cores.take(2 * MS, 1 * MS, later)) == [3], "also after a turn in which it only got its core"


def test_a_core_that_has_nothing_to_do_gets_somebody_who_waits_but_not_at_once() -> None:
    cores = Cores(SharedCores(2, (0, 1, 2)))
    long, short = cores.take(0.0, 5 * MS), cores.take(0.0, 0.2 * MS)
    waits = cores.take(0.1 * MS, 1 * MS, Turn(0.0, core=long.core))
    assert ends(long, short, waits) == [5, 0.2, 2.2], "1 ms after the short one has ended"
    assert cores.take(0.3 * MS, 0.1 * MS, waits).core == short.core


def test_whoever_comes_for_short_delays_nobody_where_a_core_is_idle() -> None:
    cores = Cores(SharedCores(2, (0,)))
    turns = [cores.take_together(0.0, 1.0, is_awaited=False)]
    cores.take(0.5, 0.25)
    assert turns[0].ended_s == 1.0


def test_threads_that_compute_together_share_what_is_left() -> None:
    cores = Cores(SharedCores(2, (0, 1)))
    first, second = (cores.take_together(0.0, seconds, is_awaited=False) for seconds in (2.0, 4.0))
    cores.take(1.0, 0.5)
    # Half a core each, for half a second.
    assert (first.ended_s, second.ended_s) == (2.25, 4.25)
    cores.take(3.0, 0.5)
    assert (first.ended_s, second.ended_s) == (2.25, 4.25), "the first had ended, and left a core"
    for _ in range(2):
        cores.take(4.0, 0.5)
    assert second.ended_s == 4.75, "both cores are taken"


def test_ranks_that_wait_for_each_other_compute_only_when_all_can() -> None:
    """Two on two cores stand still beside another; three take two turns for each piece of a step, four as well."""
    for ranks, ended_s in ((2, 1.5), (3, 2.5), (4, 2.5)):
        cores = Cores(SharedCores(2, tuple(range(ranks))))
        turns = [cores.take_together(0.0, 1.0, is_awaited=True) for _ in range(ranks)]
        cores.take(0.25, 0.5)
        assert {turn.ended_s for turn in turns} == {ended_s}
    cores = Cores(SharedCores(3, (0, 1)))
    turns = [cores.take_together(0.0, 1.0, is_awaited=True) for _ in range(2)]
    cores.take(0.25, 0.5)
    assert {turn.ended_s for turn in turns} == {1.0}, "the third core is free"


def test_cores_are_scarce_where_none_is_left() -> None:
    assert SharedCores(2, (0, 1)).are_scarce
    assert SharedCores(4, (0, 1), threads=2).are_scarce
    assert not SharedCores(3, (0, 1)).are_scarce
