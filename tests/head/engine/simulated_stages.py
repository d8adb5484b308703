"""Stage processes and their keepers in a simulated world. They speak as `stage.loop` does; the last one computes.

A process may end, stand still, be paused with its whole host, or compute for ever. Its keeper starts another,
unless the host is paused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ppserve import wire
from ppserve.core.grid import RankGrid
from ppserve.core.plan import StepPlan, StepResult, StepStamps
from ppserve.core.sampling_state import SamplingUpdate
from ppserve.core.scheduling.poison_isolation import PROBE
from ppserve.process.environment import EXIT_HEAD_GONE, EXIT_RESTART, EXIT_USAGE
from ppserve.process.patience import Life, Patience
from ppserve.stage.link import _SILENCE_S, HeadLink
from tests.core.toy_pipeline import ToyPipeline
from tests.head.engine.simulated_world import SECOND, Connection, Greeter, Network, SimulatedControl, World
from tests.head.engine.toy_ranks import ARCH, BLOCK_SIZE, NUM_BLOCKS
from tests.hellos import hello

POISON_SEED = 666
_FROZEN_S = 4.0
_JOIN_WITHIN_S = 25.0
_KILLED = -9


class Host:
    """All ranks of one replica, and their keepers' patience.

    neighbours_notice: a stage whose neighbour is gone finds its transport broken; else it waits for the head's
    word. poison_breaks: a request that kills does it by an error, which the stage survives. ends_at_once: a rank
    whose stages compute nothing and die so many seconds after they have begun. dies_of_requests: a rank whose
    stages compute nothing but probes.
    """

    new_patience = Patience

    def __init__(
        self, world: World, network: Network, control: SimulatedControl, grid: RankGrid, replica: int = 0
    ) -> None:
        self.world = world
        self.network = network
        self.control = control
        self.grid = grid
        self.num_stages = grid.pipeline
        self.neighbours_notice = world.random.random() < 0.5
        self.poison_breaks = world.random.random() < 0.3
        self.ends_at_once: tuple[int, float] | None = None
        self.dies_of_requests: int | None = None
        self.num_deaths = 0
        self._patience = {r: self.new_patience(f"rank {r}", 0.0) for r in grid.ranks_of(replica)}
        self.groups: dict[int, dict[int, StageProcess]] = {}
        self.lingering: dict[int, Connection] = {}  # of a process that has ended
        self.processes = {rank: StageProcess(self, rank) for rank in grid.ranks_of(replica)}
        for process in self.processes.values():
            world.after(world.between(0.0, 0.5), process.connect)

    def replace(self, rank: int, code: int, after_s: float = 0.0) -> None:
        """What a keeper does when its stage has ended. after_s: until there is a keeper again."""
        self.num_deaths += 1
        patience, now_s = self._patience[rank], self.world.now_ns / SECOND
        if code in (0, EXIT_USAGE):
            return  # it ends for good
        if after_s:
            self._patience[rank] = self.new_patience(f"rank {rank}", now_s)
        elif reason := patience.ended(self.processes[rank].life, code, now_s):
            self.world.note(reason)
            self.end_of_last(rank)
            self._give_up(rank, reason)
            return
        self.processes[rank] = StageProcess(self, rank)
        self.world.after(after_s + self.world.between(0.2, 1.5), self.processes[rank].connect)

    def _give_up(self, rank: int, reason: str) -> None:
        """A keeper tells the head."""

        def tell(connection: Connection) -> None:
            connection.sendall(wire.encode(wire.GaveUp(reason)))
            connection.end()

        Greeter(rank, lambda: self.control, self.secret, tell, self.world.note, lambda action: action())

    def end_of_last(self, rank: int) -> None:
        if connection := self.lingering.pop(rank, None):
            connection.end()

    def secret(self) -> bytes:
        """Of the head that there is now."""
        return self.control.secret

    def has_new_head(self, control: SimulatedControl) -> None:
        """It counts its epochs anew; who is in the old ones' groups does not hear of it."""
        self.control = control
        self.groups = {}


class StageProcess:
    """One life of a stage."""

    def __init__(self, host: Host, rank: int) -> None:
        self.rank = rank
        at = host.grid.place(rank)
        self.stage, self.tensor = at.stage, at.tensor
        self.place = at.stage * host.grid.tensor + at.tensor
        self.is_alive = True
        self.is_frozen = False
        self.spins = False
        self.slowness = 1.0
        self._host = host
        self._world = host.world
        self._groups = host.groups
        self._waiting: deque[Callable[[], None]] = deque()
        self._greeter: Greeter | None = None
        self._link: HeadLink | None = None
        self._heard_ns = 0
        self._toy = ToyPipeline(BLOCK_SIZE)
        self._epoch = 0
        self.life = Life()
        if self._ends_at_once and host.ends_at_once:
            host.world.after(host.ends_at_once[1], lambda: self.end("as every time"))
        self._forget()

    def _forget(self) -> None:
        self._is_ready = self._computes = False
        self._plans: deque[tuple[StepPlan, SamplingUpdate]] = deque()
        self._arrived: set[int] = set()
        # What it has computed of this step is given to the other tensor ranks; since when it computes it, and
        # whether it would skip it.
        self._gathers: tuple[StepPlan, int] | None = None

    # ---- life -----------------------------------------------------------------------------------------

    def do(self, action: Callable[[], None]) -> None:
        """Now; when it goes on, if it stands still; never, if it has ended."""
        if self.is_frozen:
            self._waiting.append(action)
        elif self.is_alive:
            action()

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        self._world.after(seconds, lambda: self.do(action))

    @property
    def _ends_at_once(self) -> bool:
        return self._host.ends_at_once is not None and self._host.ends_at_once[0] == self.rank

    def end(self, why: str, code: int = _KILLED, back_after_s: float = 0.0) -> None:
        if not self.is_alive:
            return
        self._world.note(f"process of rank {self.rank} ends: {why}")
        self.is_alive = self.is_frozen = False
        if self._greeter is not None and self._greeter.connection is not None:
            # Or a moment after the next process has connected: something else of the old one held it open.
            late = self._world.random.random() < 0.15 and not back_after_s
            self._host.lingering[self.rank] = self._greeter.connection
            if not late:
                self._host.end_of_last(self.rank)
        self._leave()
        self._host.replace(self.rank, code, back_after_s)

    def freeze(self, seconds: float, with_its_host: bool) -> None:
        """A keeper that runs kills a stage that stands still."""
        self.is_frozen = True
        if not with_its_host and seconds > _FROZEN_S:
            self._world.after(_FROZEN_S, lambda: self.end("frozen"))
        self._world.after(seconds, self._thaw)

    def _thaw(self) -> None:
        self.is_frozen = False
        while self._waiting and not self.is_frozen:
            self.do(self._waiting.popleft())

    # ---- the head -------------------------------------------------------------------------------------

    def connect(self) -> None:
        if self.is_alive:
            self._groups = self._host.groups
            refused = partial(self.end, code=EXIT_USAGE)
            control, secret = lambda: self._host.control, self._host.secret
            self._greeter = Greeter(self.rank, control, secret, self._welcome, refused, self.do)
            self._world.after(self._world.between(0.001, 0.006), partial(self._host.end_of_last, self.rank))

    def _welcome(self, connection: Connection) -> None:
        self.life.is_connected = True
        self._groups = self._host.groups
        socket: Any = connection
        # Its thread is this world: it reads what arrives.
        link = HeadLink(socket, lambda _: None, lambda: self.end("the head is gone", EXIT_HEAD_GONE), start=id)
        self._link, connection.on_bytes = link, self._arrived_of_head
        self._heard_ns = self._world.now_ns
        self._watch_head()
        self._say(hello(self.rank, self._host.grid.size, ARCH, wire.StageHost("host", "here")))

    def _arrived_of_head(self, part: bytes) -> None:
        self._heard_ns = self._world.now_ns
        if (link := self._link) is None:
            return
        link.handle_bytes(part, self._world.now_ns)
        while self.is_alive and not link.inbox.empty():
            self._take(link.inbox.get()[1])

    def _watch_head(self) -> None:
        """As a socket with a time-out that is read."""
        left_s = _SILENCE_S - (self._world.now_ns - self._heard_ns) / SECOND
        if left_s <= 0:
            self.end("nothing of the head", EXIT_HEAD_GONE)
        else:
            self.later(left_s, self._watch_head)

    def _say(self, message: wire.FromStage) -> None:
        assert self._link is not None
        self._link.send(message)

    def _take(self, message: Any) -> None:
        match message:
            case wire.Shutdown(code):
                self.end("told to begin anew" if code == EXIT_RESTART else "told to end", code)
            case wire.Assign():
                loaded = wire.Loaded("cpu", 1, 1, 10, 10 * NUM_BLOCKS, "")
                self.later(self._world.between(0.05, 0.4), lambda: self._say(loaded))
            case wire.Form(epoch):
                self._enter(epoch)
            case wire.Abandon(epoch) if epoch == self._epoch:
                self._break("told by the head")
            case wire.Plan(plan, sampling) if plan.epoch == self._epoch:
                self._plans.append((plan, sampling))
                self._compute()

    # ---- epochs ---------------------------------------------------------------------------------------

    def _enter(self, epoch: int) -> None:
        self._leave()
        self._epoch = epoch
        self._toy.lose()
        if self.place == 0:
            self._say(wire.StoreOpened(epoch, 1))
        group = self._groups.setdefault(epoch, {})
        group[self.place] = self
        if len(group) == len(self._host.processes):
            for process in group.values():
                process.later(self._world.between(0.01, 0.1), partial(process.joined, epoch))
        self.later(_JOIN_WITHIN_S, lambda: self._give_up_joining(epoch))

    def joined(self, epoch: int) -> None:
        if epoch != self._epoch:
            return
        if self._host.network.stages_are_cut:
            self.later(1.0, lambda: self._give_up_joining(epoch))
            return
        self._is_ready = self.life.is_ready = True
        self._say(wire.Ready(epoch))
        self._compute()

    def _give_up_joining(self, epoch: int) -> None:
        if epoch == self._epoch and not self._is_ready:
            self._break("no route to a neighbour")

    def neighbour_left(self, epoch: int) -> None:
        if epoch == self._epoch:
            self._break("connection reset by a neighbour")

    def _break(self, reason: str) -> None:
        epoch = self._epoch
        self._leave()
        self._say(wire.Broken(epoch, reason))

    def _leave(self) -> None:
        epoch, self._epoch = self._epoch, 0
        self._forget()
        others = [p for p in self._groups.get(epoch, {}).values() if p is not self]
        if self._host.neighbours_notice:
            for process in others:
                process.later(self._world.between(0.001, 0.05), partial(process.neighbour_left, epoch))

    # ---- steps ----------------------------------------------------------------------------------------

    def arrived(self, epoch: int, step_id: int) -> None:
        """Hidden states of a step, from the stage before."""
        if epoch == self._epoch:
            self._arrived.add(step_id)
            self._compute()

    def _compute(self) -> None:
        if self._computes or not self._is_ready or not self._plans or self._ends_at_once:
            return
        if self.stage and self._plans[0][0].step_id not in self._arrived:
            return
        plan, sampling = self._plans.popleft()
        if self._is_last:
            plan = self._toy.restored(plan, sampling)
        assert self._link is not None
        skipped = plan.is_ahead and plan.step_id in self._link.cancelled
        poisoned = any(piece.draw and piece.draw.params.seed == POISON_SEED for piece in plan.slices)
        if self._is_last and poisoned and not skipped:
            self._break("step failed") if self._host.poison_breaks else self.end("poison")
            return
        if self._host.dies_of_requests == self.rank and plan.slices != (PROBE,):
            self.end("as of every request")
            return
        self._computes = True
        if not self.spins:
            begun_ns = self._world.now_ns
            seconds = self._world.between(0.5, 1.5) * self.slowness * (0.002 + 0.0001 * plan.num_tokens)
            self.later(0.0001 if skipped else seconds, lambda: self._computed(plan, begun_ns, skipped))

    @property
    def _is_last(self) -> bool:
        return self.stage == self._host.num_stages - 1

    def _computed(self, plan: StepPlan, begun_ns: int, skipped: bool) -> None:
        if plan.epoch != self._epoch:
            return
        if self._host.grid.tensor == 1:
            self._finish(plan, begun_ns, skipped)
            return
        self._gathers = plan, begun_ns
        self._gather(plan)

    def _gather(self, plan: StepPlan) -> None:
        """The last tensor rank that comes to it lets all of them go on."""
        if plan.epoch != self._epoch or self._gathers is None or self._gathers[0] is not plan:
            return
        if self._host.network.stages_are_cut:
            self.later(0.05, lambda: self._gather(plan))
            return
        first, group = self.place - self.tensor, self._groups[plan.epoch]
        ranks = [group[first + tensor] for tensor in range(self._host.grid.tensor)]
        came = [rank._gathers for rank in ranks if rank.is_alive and rank._epoch == plan.epoch]
        if sum(each is not None and each[0].step_id == plan.step_id for each in came) < len(ranks):
            return
        for rank in ranks:
            assert rank._gathers is not None
            (of_rank, begun_ns), rank._gathers = rank._gathers, None
            rank.do(partial(rank._finish, of_rank, begun_ns))

    def _finish(self, plan: StepPlan, begun_ns: int, skipped: bool = False) -> None:
        if plan.epoch != self._epoch:
            return
        self._computes, self.life.served = False, True
        now_ns = self._world.now_ns
        stamps = StepStamps(begun_ns, begun_ns, begun_ns, begun_ns, now_ns, now_ns)
        if self._is_last and self.tensor == 0:
            self._toy.skipped = {plan.step_id} if skipped else set()
            self._toy.send(plan)
            self._say(wire.Result(replace(self._toy.run_one(), stage=self.place, stamps=stamps)))
        else:
            self._say(wire.Result(StepResult(plan.epoch, plan.step_id, self.place, stamps)))
        if not self._is_last:
            self._hand_on(plan.epoch, plan.step_id)
        self._compute()

    def _hand_on(self, epoch: int, step_id: int) -> None:
        if epoch != self._epoch:
            return
        if self._host.network.stages_are_cut:
            self.later(0.05, lambda: self._hand_on(epoch, step_id))
            return
        after = self._groups[epoch][self.place + self._host.grid.tensor]
        after.later(self._world.between(0.0001, 0.002), lambda: after.arrived(epoch, step_id))
