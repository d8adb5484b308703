"""Cores are shared: ranks, the head and callers on one host wait for them.

As by Linux. Who wakes up takes its last core, or another one that has nothing to do; else it waits where the
fewest do, behind all of them. Who computes keeps the core until it has nothing more to do or, where others wait,
until its slice has ended; then it waits again. So a core may have nothing to do for a while although somebody
waits for another one.

Threads that compute a step together wait for each other many times in it, and are simulated in another way: all of
a host's share equally what the lone ones leave. One that has lost its core to somebody else waits for that core,
since Linux moves no thread that has just run, and all others wait for it. So in a step they stand still while
somebody else has one of their cores, and three on two cores are as slow as four.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ppserve.planning.clock import Clock

# Of a machine with one core; Linux' base slice grows with the cores' logarithm, up to eight.
_SLICE_S = 0.7e-3
# A core that has nothing to do for this long gets somebody who waits. Nine in ten such times that were traced are
# shorter than 0.87 ms (docs/performance.md).
_IDLE_S = 1e-3
# What is left of a turn, or of a slice, by rounding.
_NOTHING_S = 1e-9
# Where all who wait have more to compute than twice as many slices, these are not simulated one by one.
_ROUNDS = 8


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
class Thread:
    """Or several who compute the same. left_s: how long, on a core of its own. began_s, ended_s: when its last
    turn got a core, and ended. core: which one it has, waits for or had. slice_s: how long it may keep that where
    others wait. then: done at the end. is_awaited: by others who compute the same step, many times in it."""

    left_s: float = 0.0
    began_s: float = math.inf
    ended_s: float = -math.inf
    core: int = 0
    slice_s: float = 0.0
    then: Callable[[float], None] = lambda _: None
    count: int = 1
    is_awaited: bool = False


class Cores:
    """Of a host that is simulated."""

    def __init__(self, of: SharedCores, clock: Clock) -> None:
        self.of = of
        self._clock = clock
        self._slice_s = _SLICE_S * min(of.cores, 8).bit_length()
        # Of each core: who computes there, and who waits.
        self._queues: list[list[Thread]] = [[] for _ in range(of.cores)]
        # Of each core: since when it has had nothing to do.
        self._idle_since_s = [0.0] * of.cores
        self._together: list[Thread] = []
        # What each has of a core, from when until when, if nobody else comes.
        self._shares: list[tuple[Thread, float]] = []
        self._now_s, self._until_s = 0.0, math.inf

    def take(self, now_s: float, seconds: float, thread: Thread, then: Callable[[float], None]) -> None:
        """It computes alone, that long. If its last turn ended just now, it goes on."""
        self._pass(now_s)
        goes_on = now_s - thread.ended_s <= _NOTHING_S < thread.slice_s
        thread.left_s, thread.began_s, thread.then = seconds, math.inf, then
        if goes_on:
            self._queues[thread.core].insert(0, thread)
        else:
            self._join(thread, range(self.of.cores))
        self._foresee()

    def take_together(
        self, now_s: float, seconds: float, count: int, is_awaited: bool, then: Callable[[float], None]
    ) -> Thread:
        """So many threads of a stage do, each that long. is_awaited: as in `Thread`."""
        self._pass(now_s)
        threads = Thread(seconds, then=then, count=count, is_awaited=is_awaited)
        self._together.append(threads)
        self._foresee()
        return threads

    def _join(self, thread: Thread, cores: Iterable[int]) -> None:
        last, thread.slice_s = thread.core, self._slice_s
        thread.core = min(cores, key=lambda core: (len(self._queues[core]), core != last))
        self._queues[thread.core].append(thread)

    def _pass(self, now_s: float) -> None:
        """Time passes, in which nobody ends, is moved or has had its slice before `now_s`."""
        passed_s = now_s - self._now_s
        if passed_s > 0.0:
            for thread, share in self._shares:
                thread.began_s = min(thread.began_s, self._now_s)
                thread.left_s -= passed_s * share
                if share == 1.0:  # where all have a part of the core, slices go round
                    thread.slice_s -= passed_s
            self._now_s = now_s

    def _foresee(self) -> None:
        """What comes if nobody else does: until somebody ends, is moved or has had a slice."""
        moved_s = self._move()
        busy = [queue for queue in self._queues if queue]
        shares, until_s = self._in_rounds(busy)
        shares += self._of_those_together(len(busy))
        ends_s = min((thread.left_s / share for thread, share in shares), default=math.inf)
        self._shares, self._until_s = shares, min(moved_s, self._now_s + max(0.0, min(until_s, ends_s)))
        if self._until_s < math.inf:
            self._clock.at(self._until_s, self._reach)

    def _in_rounds(self, busy: list[list[Thread]]) -> tuple[list[tuple[Thread, float]], float]:
        """Of threads that compute alone: what each has of a core, and for how long."""
        waited_for = [queue for queue in busy if len(queue) > 1]
        if not waited_for:
            return [(queue[0], 1.0) for queue in busy], math.inf
        rounds_s = _ROUNDS * self._slice_s * max(map(len, waited_for))
        long_s = min(thread.left_s * len(queue) for queue in busy for thread in queue) - rounds_s
        is_balanced = max(map(len, busy)) - min(map(len, busy)) < 2
        if is_balanced and long_s > rounds_s:
            return [(thread, 1 / len(queue)) for queue in busy for thread in queue], long_s
        return [(queue[0], 1.0) for queue in busy], min(queue[0].slice_s for queue in waited_for)

    def _of_those_together(self, num_lone: int) -> list[tuple[Thread, float]]:
        """What those have who compute together, beside so many others."""
        if not self._together:
            return []
        each, cores = sum(threads.count for threads in self._together), self.of.cores
        share = min(1.0, (cores - num_lone) / each)
        awaited = share if share == 1.0 else 0.0 if num_lone else 1 / -(-each // cores)
        given = ((threads, awaited if threads.is_awaited else share) for threads in self._together)
        return [(threads, share) for threads, share in given if share]

    def _reach(self, now_s: float) -> None:
        """Whoever has computed goes, or to the end of its queue."""
        if now_s < self._until_s:
            return  # somebody has come since this was foreseen
        self._pass(now_s)
        for core, queue in enumerate(self._queues):
            if queue and queue[0].left_s <= _NOTHING_S:
                self._end(queue.pop(0))
                self._idle_since_s[core] = now_s
            elif queue and queue[0].slice_s <= _NOTHING_S:
                thread = queue.pop(0)
                # Nor does Linux see in this moment that another core has nothing to do.
                self._join(thread, [each for each in range(self.of.cores) if self._queues[each] or each == core])
        for threads in [each for each in self._together if each.left_s <= _NOTHING_S]:
            self._together.remove(threads)
            self._end(threads)
        self._foresee()

    def _end(self, thread: Thread) -> None:
        thread.began_s, thread.ended_s = min(thread.began_s, self._now_s), self._now_s
        self._clock.at(self._now_s, thread.then)

    def _move(self) -> float:
        """Cores that have had nothing to do for long get somebody who waits. Returns when the next one does."""
        next_s = math.inf
        longest = max(self._queues, key=len)
        for core, queue in enumerate(self._queues):
            if queue or len(longest) < 2:
                continue
            if (ticks_s := self._idle_since_s[core] + _IDLE_S) > self._now_s + _NOTHING_S:
                next_s = min(next_s, ticks_s)
            else:
                queue.append(longest.pop(1))
                queue[0].core = core
                longest = max(self._queues, key=len)
        return next_s
