"""Cores are shared: ranks, the head and callers on one host take them from each other.

As by Linux, which moves whoever waits to a core that has nothing to do, and shares out the rest. Who computes for
short, the head or callers, has slept before and is let in at once, each on a core of its own if there are as many.
Those who compute for long, the ranks, have what is left, in equal shares and none more than a core.

Threads that compute a step together wait for each other many times in it. One that has lost its core to somebody
who computes for short waits for that core, since Linux moves no thread that has just run, and all others wait for
it. So together they stand still beside others, and three on two cores are as slow as four.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class SharedCores:
    """A host's. cores: that its processes may use. ranks: those on it; with rank 0 comes the head. threads: of
    each rank. caller_s: what callers on it compute for each token that they get."""

    cores: int
    ranks: tuple[int, ...]
    threads: int = 1
    caller_s: float = 0.0

    @property
    def are_scarce(self) -> bool:
        """No core is left for the head and callers."""
        return len(self.ranks) * self.threads >= self.cores


@dataclass(slots=True)
class Turn:
    """Of somebody who computes. ended_s: as long as nobody else comes. left_s: how long on a core of its own.
    is_awaited: by others who compute the same step, many times in it."""

    ended_s: float
    left_s: float = 0.0
    is_awaited: bool = False


class Cores:
    """Of a host that is simulated. Is asked in the order of time: whoever came later would slow down what has been
    before."""

    def __init__(self, of: SharedCores) -> None:
        self.of = of
        self._now_s = 0.0
        self._ranks: list[Turn] = []
        self._others: list[Turn] = []

    def take(self, now_s: float, seconds: float, is_awaited: bool = False) -> Turn:
        """For a thread of a rank, which computes that long. is_awaited: as in `Turn`."""
        return self._come(Turn(now_s, seconds, is_awaited), now_s, self._ranks)

    def interrupt(self, now_s: float, seconds: float) -> None:
        """Somebody computes that long, at once."""
        self._come(Turn(now_s, seconds), now_s, self._others)

    def _come(self, turn: Turn, now_s: float, among: list[Turn]) -> Turn:
        self._now_s = _pass(self._now_s, now_s, self._ranks, self._others, self.of.cores)
        among.append(turn)
        # What comes if nobody else does.
        ranks, others = ([replace(each) for each in turns] for turns in (self._ranks, self._others))
        foreseen = list(zip((*self._ranks, *self._others), (*ranks, *others), strict=True))
        _pass(self._now_s, math.inf, ranks, others, self.of.cores)
        for each, copy in foreseen:
            each.ended_s = copy.ended_s
        return turn


def _pass(now_s: float, until_s: float, ranks: list[Turn], others: list[Turn], cores: int) -> float:
    """Time passes while they compute; those who have ended are left out. Returns until_s."""
    while now_s < until_s and (ranks or others):
        other = min(1.0, cores / len(others)) if others else 0.0
        rank = min(1.0, max(0, cores - len(others)) / len(ranks)) if ranks else 0.0
        awaited = rank if rank == 1.0 else 0.0 if others else 1 / -(-len(ranks) // cores)
        given = [(each, awaited if each.is_awaited else rank) for each in ranks]
        given += [(each, other) for each in others]
        shares = [(each, share) for each, share in given if share]
        # The first who ends does so exactly, whatever is lost in rounding.
        seconds = min(each.left_s / share for each, share in shares)
        ends_s = now_s + seconds
        if ends_s > until_s:
            seconds, ends_s = until_s - now_s, until_s
        for each, share in shares:
            each.left_s -= seconds * share
            if each.left_s <= 1e-12:
                each.left_s, each.ended_s = 0.0, ends_s
        now_s = ends_s
        for turns in (ranks, others):
            turns[:] = [each for each in turns if each.left_s > 0]
    return until_s
