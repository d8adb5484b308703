"""Cores that several take from each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from ppserve.planning.clock import Clock
from ppserve.planning.cores import Cores, SharedCores, Thread

MS = 1e-3


class CountingClock(Clock):
    num_done = 0

    def at(self, at_s: float, do: Callable[[float], None]) -> None:
        self.num_done += 1
        super().at(at_s, do)


class Host:
    """All times in milliseconds."""

    def __init__(self, num_cores: int) -> None:
        self.clock = CountingClock()
        self.cores = Cores(SharedCores(num_cores, (0,)), self.clock)

    def alone(self, at_ms: float, ms: float, core: int = 0, then: float = 0.0) -> Thread:
        """Computes from then on. core: its last one. then: how long it goes on at the end."""
        thread = Thread(core=core)
        self.again(thread, at_ms, ms, then)
        return thread

    def again(self, thread: Thread, at_ms: float, ms: float, then: float = 0.0) -> None:
        after = partial(self._take, thread, then) if then else lambda _: None
        self.clock.at(at_ms * MS, lambda now_s: self.cores.take(now_s, ms * MS, thread, after))

    def _take(self, thread: Thread, ms: float, now_s: float) -> None:
        self.cores.take(now_s, ms * MS, thread, lambda _: None)

    def together(self, at_ms: float, ms: float, count: int = 1, is_awaited: bool = False) -> list[float]:
        """When they have computed."""
        ended_ms: list[float] = []

        def take(now_s: float) -> None:
            self.cores.take_together(now_s, ms * MS, count, is_awaited, ended)

        def ended(now_s: float) -> None:
            ended_ms.append(round(now_s / MS, 6))

        self.clock.at(at_ms * MS, take)
        return ended_ms

    def ends(self, *threads: Thread) -> list[float]:
        """The last ones of all these."""
        self.clock.run()
        return [round(thread.ended_s / MS, 6) for thread in threads]


def test_whoever_comes_takes_a_core_that_has_nothing_to_do() -> None:
    host = Host(2)
    first, second, third = host.alone(5, 3), host.alone(6, 1), host.alone(10, 1, core=1)
    assert host.ends(first, second, third) == [8, 7, 11]
    assert [first.core, second.core, third.core] == [0, 1, 1]


def test_its_last_one_if_that_has_nothing_to_do_either() -> None:
    host = Host(3)
    first = [host.alone(0, 1, core) for core in (2, 1, 0)]
    later = [host.alone(2, 1, core=1) for _ in range(2)]
    host.ends()
    assert [thread.core for thread in first + later] == [2, 1, 0, 1, 0]


def test_who_waits_has_its_slice_when_that_of_another_has_ended() -> None:
    """Of 1.4 ms on two cores, and whoever has had one waits again."""
    host = Host(2)
    long, other = host.alone(0, 3), host.alone(0, 9)
    waits, short = host.alone(0.2, 2), host.alone(4.9, 0.5)
    assert host.ends(long, waits, other, short) == [5, 4.8, 9, 5.5]
    assert round(waits.began_s / MS, 6) == 1.4


def test_who_comes_waits_where_fewer_do() -> None:
    host = Host(2)
    long = [host.alone(0, 9, core) for core in (0, 1, 0)]
    assert host.alone(0.1, 9, core=0).core == 0
    waits = host.alone(0.2, 1, core=1)
    host.ends()
    assert waits.core == 1
    assert [thread.core for thread in long] == [0, 1, 0]


def test_who_has_had_a_slice_waits_where_two_fewer_do() -> None:
    """Three wait for one core when all but one have left the other, which is never idle."""
    host = Host(2)
    stays = host.alone(0, 20, core=1)
    gone = [host.alone(0, 0.3, core=1) for _ in range(2)]
    longs = [host.alone(0, 20, core=0) for _ in range(3)]
    ends = host.ends(stays, *longs)
    assert max(host.ends(*gone)) < 3
    assert sorted(ends) == pytest.approx([40, 40, 40, 40], abs=2)


def test_slices_are_longer_on_more_cores() -> None:
    for num_cores, slice_ms in ((1, 0.7), (2, 1.4), (4, 2.1), (8, 2.8), (64, 2.8)):
        host = Host(num_cores)
        threads = [host.alone(0, 9, core) for core in (*range(num_cores), 0)]
        host.ends()
        assert threads[-1].began_s == pytest.approx(slice_ms * MS)


def test_who_goes_on_keeps_its_core_and_what_is_left_of_its_slice() -> None:
    """Of 0.7 ms on one core: 0.3 after 0.4."""
    host = Host(1)
    first, other = host.alone(0, 0.4, then=1), host.alone(0.1, 0.5)
    assert host.ends(first, other) == [1.9, 1.2]
    host = Host(1)
    first, other = host.alone(0, 0, then=1), host.alone(0.1, 0.5)
    assert host.ends(first, other) == [1.5, 1.2], "also after a turn in which it only got its core"


def test_who_has_had_its_slice_does_not_go_on_before_others() -> None:
    host = Host(1)
    first, other = host.alone(0, 5, then=1), host.alone(4.9, 0.5)
    assert host.ends(first, other) == [6.5, 5.4]


def test_a_core_that_has_nothing_to_do_gets_somebody_who_waits_but_not_at_once() -> None:
    host = Host(2)
    long, short = host.alone(0, 5), host.alone(0, 0.2, core=1)
    waits, soon = host.alone(0.1, 1), host.alone(0.25, 0.1, core=1)
    assert host.ends(long, short, waits, soon) == [5, 0.2, 2.35, 0.35], "1 ms after the last one there has ended"
    assert [waits.core, soon.core] == [1, 1]


def test_a_turn_has_begun_when_it_first_had_a_core_whoever_came_before_that() -> None:
    host = Host(1)
    first, waits = host.alone(0, 0.5, then=0.1), host.alone(0.1, 1)
    host.ends()
    assert waits.began_s == pytest.approx(0.6 * MS)
    assert first.began_s == pytest.approx(0.5 * MS)


def test_many_simulated_hours_end() -> None:
    """Where a double has fewer digits left than a turn's rounding."""
    host = Host(2)
    first_s = 100 * 3600.0
    turns = [host.alone(1e3 * first_s + number / 7, 1 / 3, then=1 / 9) for number in range(50)]
    host.ends()
    assert all(thread.ended_s > first_s for thread in turns)


def test_long_turns_are_not_simulated_slice_by_slice() -> None:
    """Three of an hour each are 2.6 million slices."""
    host = Host(1)
    hours = [host.alone(0, 3600e3) for _ in range(3)]
    between = host.alone(1000e3, 1)
    ends = host.ends(*hours)
    assert host.clock.num_done < 1000
    assert ends == pytest.approx([3 * 3600e3] * 3, abs=5)
    assert between.ended_s == pytest.approx(1000 + 5.2 * MS), "three slices of the others before each of its own"


def test_whoever_comes_for_short_delays_nobody_where_a_core_is_idle() -> None:
    host = Host(2)
    ended_ms = host.together(0, 10)
    host.alone(5, 2.5)
    host.ends()
    assert ended_ms == [10]


def test_threads_that_compute_together_share_what_is_left() -> None:
    host = Host(2)
    first, second = host.together(0, 20), host.together(0, 40)
    host.alone(10, 5)  # half a core each, for that time
    host.alone(30, 5)  # the first has ended, and left a core
    for _ in range(2):
        host.alone(40, 5)  # both cores are taken
    host.ends()
    assert (first, second) == ([22.5], [47.5])


def test_ranks_that_wait_for_each_other_compute_only_when_all_can() -> None:
    """Two on two cores stand still beside another; three take two turns for each piece of a step, four as well."""
    for ranks, ended_ms in ((2, 15), (3, 25), (4, 25)):
        host = Host(2)
        ended = host.together(0, 10, ranks, is_awaited=True)
        host.alone(2.5, 5)
        host.ends()
        assert ended == [ended_ms]
    host = Host(3)
    ended = host.together(0, 10, 2, is_awaited=True)
    host.alone(2.5, 5)
    host.ends()
    assert ended == [10], "the third core is free"


def test_cores_are_scarce_where_none_is_left() -> None:
    assert SharedCores(2, (0, 1)).are_scarce
    assert SharedCores(4, (0, 1), threads=2).are_scarce
    assert not SharedCores(3, (0, 1)).are_scarce
