"""Cores that several take from each other."""

from __future__ import annotations

from ppserve.planning.cores import Cores, SharedCores


def test_ranks_share_the_cores_equally_and_none_has_more_than_one() -> None:
    cores = Cores(SharedCores(2, (0, 1, 2)))
    first, second = (cores.take(0.5, seconds) for seconds in (3.0, 1.0))
    assert (first.ended_s, second.ended_s) == (3.5, 1.5)
    third = cores.take(0.5, 1.0)
    # Two thirds of a core each for 1.5 seconds; then the first has one of its own.
    assert (first.ended_s, second.ended_s, third.ended_s) == (4.0, 2.0, 2.0)
    assert cores.take(10.0, 1.0).ended_s == 11.0


def test_no_core_is_idle_while_somebody_waits_for_one() -> None:
    """Who has waited moves to the core that another has left."""
    cores = Cores(SharedCores(2, (0, 1, 2)))
    turns = [cores.take(0.0, seconds) for seconds in (1.0, 3.0, 1.0, 1.0)]
    assert max(turn.ended_s for turn in turns) == 4.0
    assert [turn.ended_s for turn in turns] == [2.0, 4.0, 2.0, 2.0]


def test_whoever_comes_for_short_delays_nobody_where_a_core_is_idle() -> None:
    cores = Cores(SharedCores(2, (0,)))
    turn = cores.take(0.0, 1.0)
    cores.interrupt(0.5, 0.25)
    assert turn.ended_s == 1.0


def test_and_elsewhere_all_ranks_by_its_share() -> None:
    cores = Cores(SharedCores(2, (0, 1)))
    first, second = (cores.take(0.0, seconds) for seconds in (2.0, 4.0))
    cores.interrupt(1.0, 0.5)
    # Half a core each, for half a second.
    assert (first.ended_s, second.ended_s) == (2.25, 4.25)
    cores.interrupt(3.0, 0.5)
    assert (first.ended_s, second.ended_s) == (2.25, 4.25), "the first had ended, and left a core"
    for _ in range(3):
        cores.interrupt(4.0, 0.5)
    assert second.ended_s == 5.0, "three on two cores take 0.75 s, and the rank has to wait"


def test_ranks_that_wait_for_each_other_compute_only_when_all_can() -> None:
    """Two on two cores stand still beside another; three take two turns for each piece of a step, four as well."""
    for ranks, ended_s in ((2, 1.5), (3, 2.5), (4, 2.5)):
        cores = Cores(SharedCores(2, tuple(range(ranks))))
        turns = [cores.take(0.0, 1.0, is_awaited=True) for _ in range(ranks)]
        cores.interrupt(0.25, 0.5)
        assert {turn.ended_s for turn in turns} == {ended_s}
    cores = Cores(SharedCores(3, (0, 1)))
    turns = [cores.take(0.0, 1.0, is_awaited=True) for _ in range(2)]
    cores.interrupt(0.25, 0.5)
    assert {turn.ended_s for turn in turns} == {1.0}, "the third core is free"


def test_cores_are_scarce_where_none_is_left() -> None:
    assert SharedCores(2, (0, 1)).are_scarce
    assert SharedCores(4, (0, 1), threads=2).are_scarce
    assert not SharedCores(3, (0, 1)).are_scarce
