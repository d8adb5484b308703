"""What goes wrong in a history, and for how long."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tests.head.engine.simulated_stages import StageProcess
from tests.head.engine.simulated_world import SECOND

if TYPE_CHECKING:
    from tests.head.engine.history import History


class Faults:
    """Of one history. number: planned so far."""

    def __init__(self, history: History) -> None:
        self.number = 0
        self._of = history
        self._world, self._network, self._grid = history.world, history.network, history.grid
        self._random = history.random
        self._is_cut_for_good = False

    def plan(self) -> float:
        """Returns when the last one is over."""
        random, over_s, at_s = self._random, 1.0, 0.0
        at_once = self._kill, self._spin, self._restart, self._twin
        if self._of.never_heals:
            self._world.after(random.uniform(0.0, 2.0), self._hurt_for_ever)
        for _ in range(random.randint(0, 5)):
            # Often while the last fault is not over: that is where histories are interesting.
            at_s += random.choice((random.uniform(0.0, 0.2), random.uniform(0.0, 2.0), random.uniform(0.0, 12.0)))
            faults = [self._kill, self._kill, self._freeze, self._pause, self._spin, self._slow,
                      self._cut, self._cut_stages, self._head_sleeps, self._starve, self._twin]  # fmt: skip
            faults += [self._restart, self._restart] if self._of.num_replicas > 1 else []
            fault = random.choice(faults)
            rank, lasts_s = random.randrange(self._grid.size), random.choice((0.3, 2.0, 6.0, 11.0, 20.0))
            self.number += 1
            self._world.after(at_s, partial(fault, rank, lasts_s))
            over_s = max(over_s, at_s + lasts_s * (fault not in at_once))
        for fault in (self._restart_head, self._lose_agent):
            if random.random() < 0.15 and not self._of.never_heals:
                at_s, lasts_s = random.uniform(0.0, 6.0), random.choice((0.3, 2.0, 11.0))
                self.number += 1
                self._world.after(at_s, partial(fault, random.randrange(self._grid.size), lasts_s))
                over_s = max(over_s, at_s + lasts_s)
        return over_s

    def heal(self) -> None:
        self._world.note("the faults are over")
        self._join_stages()
        for rank in range(self._grid.size):
            self._network.heal(rank)

    def _process(self, rank: int, what: str) -> StageProcess:
        self._world.note(f"{what} rank {rank}")
        return self._of.hosts[self._grid.place(rank).replica].processes[rank]

    def _kill(self, rank: int, _lasts_s: float) -> None:
        self._process(rank, "kill").end("killed")

    def _restart(self, rank: int, _lasts_s: float) -> None:
        self._world.note(f"restart the replica of rank {rank}")
        self._of.engine.restart(self._grid.place(rank).replica, pauses=True)

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
        self._of.head_sleeps_until_ns = self._world.now_ns + int(lasts_s * SECOND)

    def _restart_head(self, _rank: int, lasts_s: float) -> None:
        """Its memory is lost. Callers resume; stages find the next head, which may come at once or late."""
        if not self._of.control.is_up:
            return
        self._world.note(f"the head dies; another comes after {lasts_s} s")
        self._of.control.die()
        self._world.after(lasts_s, self._of.next_head)

    def _lose_agent(self, rank: int, lasts_s: float) -> None:
        """A rank's keeper ends with its stage, and its agent, or another host's, starts both again."""
        self._process(rank, f"end for {lasts_s} s the agent of").end("its agent is gone", back_after_s=lasts_s)

    def _starve(self, _rank: int, lasts_s: float) -> None:
        """The head has no free file descriptor."""
        self._world.note(f"no descriptors for {lasts_s} s")
        listener = self._of.control.listener
        listener.is_starved = True
        self._world.after(lasts_s, lambda: setattr(listener, "is_starved", False))

    def _twin(self, rank: int, _lasts_s: float) -> None:
        """Another process of a rank connects, with the right proof, and leaves at once."""
        self._world.note(f"a twin of rank {rank}")
        if self._of.control.is_up:
            # It leaves, welcome or not, and does not come again.
            twin: list[bool] = []
            host = self._of.hosts[self._grid.place(rank).replica]
            greeter = host.greet(rank, id, lambda do: None if twin else do())

            def leave() -> None:
                twin.append(True)
                if greeter.connection is not None:
                    greeter.connection.end()

            self._world.after(self._random.choice((0.0, 0.005, 1.0)), leave)

    def _hurt_for_ever(self) -> None:
        host, rank = self._of.hosts[0], self._random.randrange(self._grid.size)
        kinds = [self._die_at_once, self._die_at_once, self._die_of_requests]
        self._random.choice(kinds if self._of.num_stages == 1 else [*kinds, self._never_reach_others])(rank)
        host.processes[rank].end("the first time")

    def _never_reach_others(self, _rank: int) -> None:
        self._world.note("stages never reach each other again")
        self._network.stages_are_cut = self._is_cut_for_good = True

    def _die_at_once(self, rank: int) -> None:
        after_s = self._random.choice((0.5, 15.0))
        self._world.note(f"every stage of rank {rank} dies after {after_s} s")
        self._of.hosts[0].ends_at_once = rank, after_s

    def _die_of_requests(self, rank: int) -> None:
        """It computes probes. There is always a request."""
        self._world.note(f"every stage of rank {rank} dies of any request")
        self._of.hosts[0].dies_of_requests = rank
        self._of.all_may_be_convicted = True
        self._of.ask_on(1000)
