"""What goes wrong in a history, and for how long."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from ppserve.core.architecture import Split
from tests.head.engine.scripted import SECOND
from tests.head.engine.simulated_processes import Lack, StageProcess

if TYPE_CHECKING:
    from tests.head.engine.history import History

NUM_SUBLAYERS = 8
LASTS_S = (0.3, 2.0, 6.0, 11.0, 20.0)


class Faults:
    """The faults of one history. number: planned so far, with num_reshapes."""

    def __init__(self, history: History) -> None:
        self.number = 0
        self.num_reshapes = 0
        self._history, self._world, self._network = history, history.world, history.network
        self._random, self._size = history.random, history.grid.size
        self._is_cut_for_good = False

    def plan(self) -> float:
        """Returns when the last one is over."""
        random, over_s, at_s = self._random, 1.0, 0.0
        if self._history.never_heals:
            self._world.after(random.uniform(0.0, 2.0), self._hurt_for_ever)
        faults = [self._kill, self._kill, self._freeze, self._pause, self._spin, self._slow,
                  self._cut, self._cut_stages, self._head_sleeps]  # fmt: skip
        faults += [self._restart, self._restart] if self._history.num_replicas > 1 else []
        for _ in range(random.randint(0, 5)):
            # Often while the last fault is not over: that is where histories are interesting.
            at_s += random.choice((random.uniform(0.0, 0.2), random.uniform(0.0, 2.0), random.uniform(0.0, 12.0)))
            fault, lasts_s = random.choice(faults), random.choice(LASTS_S)
            is_momentary = fault in (self._kill, self._spin, self._restart)
            over_s = max(over_s, self._plan(fault, at_s, lasts_s) - lasts_s * is_momentary)
        if random.random() < 0.15 and not self._history.never_heals:
            at_s, lasts_s = random.uniform(0.0, 6.0), random.choice((0.3, 2.0, 11.0))
            over_s = max(over_s, self._plan(self._restart_head, at_s, lasts_s))
        return max(over_s, self._plan_reshapes())

    def _plan_reshapes(self) -> float:
        """Layers are divided anew in half of the histories, also while faults last. Returns when the last begins.
        Chance of its own: histories without reshapes are what they were."""
        history, random = self._history, Random(f"reshapes of {self._history.seed}")
        if history.never_heals or random.random() < 0.5:
            return 0.0
        for host in history.hosts:
            host.lack = random.choice((None, *Lack)) if history.num_stages > 1 else None
        at_s = 0.0
        for _ in range(random.randint(1, 3)):
            at_s += random.choice((random.uniform(0.0, 0.5), random.uniform(0.0, 3.0)))
            num_stages = random.randint(1, history.num_stages)
            cuts = sorted(random.sample(range(1, NUM_SUBLAYERS), num_stages - 1))
            sizes = map(operator.sub, (*cuts, NUM_SUBLAYERS), (0, *cuts))
            replica = random.randrange(history.num_replicas)
            self._world.after(at_s, partial(history.reshape, replica, Split(tuple(sizes))))
            self.number += 1
            self.num_reshapes += 1
        return at_s

    def _plan(self, fault: Callable[[int, float], None], at_s: float, lasts_s: float) -> float:
        self.number += 1
        self._world.after(at_s, partial(fault, self._random.randrange(self._size), lasts_s))
        return at_s + lasts_s

    def heal(self) -> None:
        self._world.note("the faults are over")
        self._join_stages()
        for rank in range(self._size):
            self._network.heal(rank)

    def _process(self, rank: int, what: str) -> StageProcess:
        self._world.note(f"{what} rank {rank}")
        return self._history.process(rank)

    def _kill(self, rank: int, _lasts_s: float) -> None:
        self._process(rank, "kill").end("killed")

    def _restart(self, rank: int, _lasts_s: float) -> None:
        self._world.note(f"restart the replica of rank {rank}")
        self._history.engine.restart(self._history.grid.place(rank).replica, pauses=True)

    def _freeze(self, rank: int, lasts_s: float) -> None:
        self._process(rank, f"freeze for {lasts_s} s").freeze(lasts_s, with_its_host=False)

    def _pause(self, rank: int, lasts_s: float) -> None:
        self._process(rank, f"pause for {lasts_s} s the host of").freeze(lasts_s, with_its_host=True)

    def _spin(self, rank: int, _lasts_s: float) -> None:
        self._process(rank, "spin").spins = True

    def _slow(self, rank: int, lasts_s: float) -> None:
        process = self._process(rank, f"slow for {lasts_s} s")
        process.slowness = 30.0
        self._world.after(lasts_s, lambda: setattr(process, "slowness", 1.0))

    def _cut(self, rank: int, lasts_s: float) -> None:
        self._world.note(f"cut for {lasts_s} s rank {rank}")
        for direction in self._random.choice((("up",), ("down",), ("up", "down"))):
            self._network.cut.add((rank, direction))
        self._world.after(lasts_s, lambda: self._network.heal(rank))

    def _cut_stages(self, _rank: int, lasts_s: float) -> None:
        self._world.note(f"cut the stages from each other for {lasts_s} s")
        self._network.stages_are_cut = True
        self._world.after(lasts_s, self._join_stages)

    def _join_stages(self) -> None:
        self._network.stages_are_cut = self._is_cut_for_good

    def _head_sleeps(self, _rank: int, lasts_s: float) -> None:
        self._world.note(f"the head sleeps for {lasts_s} s")
        self._history.head_sleeps_until_ns = self._world.now_ns + int(lasts_s * SECOND)

    def _restart_head(self, _rank: int, lasts_s: float) -> None:
        """Its memory is lost. Callers resume; stages find the next head, which may come at once or late."""
        if self._history.control.is_up:
            self._world.note(f"the head dies; another comes after {lasts_s} s")
            self._history.control.close(0.0)
            self._world.after(lasts_s, self._history.next_head)

    def _hurt_for_ever(self) -> None:
        """Stages never reach each other, or those of one rank die after a time, or of every request."""
        host, rank = self._history.hosts[0], self._random.randrange(self._size)
        hurt = self._random.choice(("dies", "dies", "requests", "cut")[: 3 + (self._history.num_stages > 1)])
        self._world.note(f"rank {rank} for ever: {hurt}")
        if hurt == "dies":
            host.ends_after_s[rank] = self._random.choice((0.5, 15.0))
        elif hurt == "requests":  # it computes probes, and there is always a request
            host.dies_of_requests = rank
            self._history.ask_on(1000)
        else:
            self._network.stages_are_cut = self._is_cut_for_good = True
        host.processes[rank].end("the first time")
