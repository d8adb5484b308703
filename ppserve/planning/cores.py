"""Cores are shared: ranks, the head and callers on one host wait for them.

As by Linux. Who wakes up takes its last core, or another one that has nothing to do; else it waits for its last
one, behind all who wait there. Who computes keeps the core until it has nothing more to do or, where others wait,
until its slice has ended. So a core may have nothing to do for a while although somebody waits for another one.

Threads that compute a step together wait for each other many times in it, and are simulated in another way: all of
a host's share equally what the lone ones leave. One that has lost its core to somebody else waits for that core,
since Linux moves no thread that has just run, and all others wait for it. So in a step they stand still while
somebody else has one of their cores, and three on two cores are as slow as four.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass

# Of a machine with one core; Linux' base slice grows with the cores' logarithm, up to eight.
_SLICE_S = 0.7e-3
# A core that has nothing to do for this long gets somebody who waits. Nine in ten such times that were traced are
# shorter than 0.87 ms (docs/performance/shapes.md).
_IDLE_S = 1e-3


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


@dataclass(slots=True, eq=False)
class Turn:
    """Of a thread that computes. ended_s: as long as nobody else comes. began_s: when it got a core. left_s: how
    long on a core of its own. core: which one it has or waits for. slice_s: how long it may keep that where others
    wait. is_awaited: by others who compute the same step, many times in it."""

    ended_s: float
    left_s: float = 0.0
    began_s: float = math.inf
    core: int = 0
    slice_s: float = 0.0
    is_awaited: bool = False


class Cores:
    """Of a host that is simulated. Is asked in the order of time: whoever came later would slow down what has been
    before."""

    def __init__(self, of: SharedCores) -> None:
        self.of = of
        self._slice_s = _SLICE_S * min(of.cores, 8).bit_length()
        self._now_s = 0.0
        # Of each core: who computes there, and who waits.
        self._queues: list[list[Turn]] = [[] for _ in range(of.cores)]
        # Of each core: since when it has had nothing to do.
        self._idle_since_s = [0.0] * of.cores
        self._together: list[Turn] = []

    def take(self, now_s: float, seconds: float, last: Turn | None = None) -> Turn:
        """For a lone thread that computes that long. last: its turn before; if that ends now, it goes on."""
        self._pass(now_s)
        turn = Turn(now_s, seconds, slice_s=self._slice_s)
        turn.core = self._shortest() if last is None else last.core
        if last is not None and last.ended_s == now_s:
            turn.slice_s = last.slice_s
            queue = self._queues[turn.core]
            if queue and queue[0] is last:
                del queue[0]
            queue.insert(0, turn)
        else:
            if self._queues[turn.core] and not self._queues[shortest := self._shortest()]:
                turn.core = shortest
            self._queues[turn.core].append(turn)
        self._foresee()
        return turn

    def take_together(self, now_s: float, seconds: float, is_awaited: bool) -> Turn:
        """For one of several threads of a stage, that long. is_awaited: as in `Turn`."""
        self._pass(now_s)
        turn = Turn(now_s, seconds, began_s=now_s, is_awaited=is_awaited)
        self._together.append(turn)
        self._foresee()
        return turn

    def _shortest(self) -> int:
        return min(range(self.of.cores), key=lambda core: len(self._queues[core]))

    def _all(self) -> Iterator[Turn]:
        for queue in (*self._queues, self._together):
            yield from queue

    def _foresee(self) -> None:
        """What comes if nobody else does."""
        future = Cores(self.of)
        future._now_s = self._now_s
        future._idle_since_s = self._idle_since_s[:]
        future._queues = [[copy(turn) for turn in queue] for queue in self._queues]
        future._together = [copy(turn) for turn in self._together]
        pairs = list(zip(self._all(), future._all(), strict=True))
        future._pass(math.inf)
        for turn, foreseen in pairs:
            turn.began_s, turn.ended_s = foreseen.began_s, foreseen.ended_s

    def _pass(self, until_s: float) -> None:
        """Time passes, from one who ends, is moved or has had a slice to the next."""
        while self._now_s < until_s and any(self._all()):
            ends_s = min(until_s, self._move())
            given = [(queue[0], 1.0) for queue in self._queues if queue]
            for turn, _ in given:
                turn.began_s = min(turn.began_s, self._now_s)
                if self._queues[turn.core][1:]:
                    ends_s = min(ends_s, self._now_s + turn.slice_s)
            given += self._shares(len(given))
            # The first who ends does so exactly, whatever is lost in rounding.
            ends_s = min(ends_s, *(self._now_s + turn.left_s / share for turn, share in given))
            for turn, share in given:
                turn.left_s -= (ends_s - self._now_s) * share
                turn.slice_s -= ends_s - self._now_s
                if turn.left_s <= 1e-12:
                    turn.left_s, turn.ended_s = 0.0, ends_s
            self._now_s = ends_s
            self._together = [turn for turn in self._together if turn.left_s]
            for core in range(self.of.cores):
                self._next(core)
        self._now_s = until_s

    def _next(self, core: int) -> None:
        """Whoever has computed there goes, or to the end of its queue."""
        queue = self._queues[core]
        if queue and not queue[0].left_s:
            del queue[0]
            self._idle_since_s[core] = self._now_s
        elif queue and queue[0].slice_s <= 1e-12:
            queue[0].slice_s = self._slice_s
            queue.append(queue.pop(0))

    def _move(self) -> float:
        """Cores that have had nothing to do for long get somebody who waits. Returns when the next one does."""
        next_s = math.inf
        for core, queue in enumerate(self._queues):
            longest = max(self._queues, key=len)
            if queue or len(longest) < 2:
                continue
            if (ticks_s := self._idle_since_s[core] + _IDLE_S) > self._now_s:
                next_s = min(next_s, ticks_s)
            else:
                queue.append(longest.pop(1))
                queue[0].core = core
        return next_s

    def _shares(self, num_lone: int) -> list[tuple[Turn, float]]:
        """What those have who compute together, beside so many others."""
        if not self._together:
            return []
        each, cores = len(self._together), self.of.cores
        share = min(1.0, (cores - num_lone) / each)
        awaited = share if share == 1.0 else 0.0 if num_lone else 1 / -(-each // cores)
        given = ((turn, awaited if turn.is_awaited else share) for turn in self._together)
        return [(turn, share) for turn, share in given if share]
