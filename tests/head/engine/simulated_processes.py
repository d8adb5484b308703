"""Stage processes and their keepers in a simulated world. They speak as `stage.loop` does; the last one computes.

A process may end, stand still, be paused with its whole host, or compute for ever. Its keeper starts another,
unless the host is paused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Any

from ppserve import wire
from ppserve.core.architecture import StageLayout
from ppserve.core.grid import RankGrid
from ppserve.core.plan import StepPlan, StepStamps
from ppserve.core.scheduling.slots import PROBE
from ppserve.process.keeper import Reported, RestartPolicy
from ppserve.process.lifetime import EXIT_HEAD_GONE, EXIT_USAGE
from ppserve.stage.link import _SILENCE_S, HeadLink
from tests.head.engine.scripted import ARCH, BLOCK_SIZE, NUM_BLOCKS, SECOND
from tests.head.engine.simulated_world import Connection, Network, SimulatedControl, World
from tests.hellos import hello, host_of
from tests.simulated_stage import SimulatedStage

POISON_SEED = 666
MOST_SUBLAYERS = 5
"""The most sublayers that a rank can have on a host that lacks something."""
_FROZEN_S = 4.0
_JOIN_WITHIN_S = 25.0
_RETRY_EVERY_S = 0.2
_KILLED = -9


class Lack(Enum):
    """What becomes of a rank that gets too many layers."""

    WEIGHTS = auto()
    """It says that it cannot load them."""
    LIFE = auto()
    """The system ends its process while it loads."""
    ROOM = auto()
    """One full sequence has no room beside them."""
    CACHE = auto()
    """It says that it has no memory for the cache of an epoch."""


class Host:
    """All ranks of one replica, and their keepers' restart policies."""

    def __init__(
        self, world: World, network: Network, control: SimulatedControl, grid: RankGrid, replica: int = 0
    ) -> None:
        self.world = world
        self.network = network
        self.control = control
        self.grid = grid
        self.neighbours_notice = world.random.random() < 0.5
        """A stage whose neighbour is gone finds its transport broken; else it waits for the head's word."""
        self.poison_breaks = world.random.random() < 0.3
        """A request that kills does it by an error, which the stage survives."""
        self.ends_after_s: dict[int, float] = {}
        """Ranks whose stages compute nothing, and after how many seconds these die."""
        self.dies_of_requests: int | None = None
        """A rank whose stages compute nothing but probes."""
        self.lack: Lack | None = None
        """What a rank has too little of for more than MOST_SUBLAYERS of them."""
        self.num_deaths = 0
        self._policies = {r: RestartPolicy(f"rank {r}", 0.0) for r in grid.ranks_of(replica)}
        self.groups: dict[int, dict[int, StageProcess]] = {}
        self.processes = {rank: StageProcess(self, rank) for rank in grid.ranks_of(replica)}
        for process in self.processes.values():
            world.after(world.between(0.0, 0.5), process.connect)

    def replace(self, rank: int, code: int) -> None:
        """What a keeper does when its stage has ended."""
        self.num_deaths += 1
        if code in (0, EXIT_USAGE):
            return
        reported, now_s = self.processes[rank].reported, self.world.now_ns / SECOND
        if reason := self._policies[rank].count_death(reported, code, now_s):
            self.world.note(reason)
            self._give_up(rank, reason)
            return
        self.processes[rank] = StageProcess(self, rank)
        self.world.after(self.world.between(0.2, 1.5), self.processes[rank].connect)

    def _give_up(self, rank: int, reason: str) -> None:
        """A keeper tells the head."""
        if self.control.accepts(rank):
            self.control.connect(rank, lambda _: None).up.send(wire.Failed(reason))
        else:
            self.world.after(_RETRY_EVERY_S, partial(self._give_up, rank, reason))

    def has_new_head(self, control: SimulatedControl) -> None:
        """It counts its epochs anew; stages in the old ones' groups do not hear of it."""
        self.control = control
        self.groups = {}


class StageProcess:
    """One life of a stage."""

    def __init__(self, host: Host, rank: int) -> None:
        self.rank = rank
        at = host.grid.place(rank)
        self.stage, self.tensor = at.stage, at.tensor
        self.place = at.stage * host.grid.tensor + at.tensor
        self.reported: Reported = set()
        self.is_alive = True
        self.is_frozen = False
        self.spins = False
        self.slowness = 1.0
        self._host = host
        self._world = host.world
        self._groups = host.groups
        self._waiting: deque[Callable[[], None]] = deque()
        self._connection: Connection | None = None
        self._link: HeadLink | None = None
        self._heard_ns = 0
        self.layout: StageLayout | None = None
        """What it has loaded."""
        self._is_last = False
        self._num_blocks = 0
        self._computing = SimulatedStage(BLOCK_SIZE, self.place)
        self._epoch = 0
        if rank in host.ends_after_s:
            host.world.after(host.ends_after_s[rank], lambda: self.end("as every time"))
        self._forget()

    def _forget(self) -> None:
        self._is_ready = self._computes = False
        self._computing.lose()
        self._arrived: set[int] = set()
        self._gathers: tuple[StepPlan, int] | None = None
        """A step whose part is computed and that waits for the other tensor ranks, and when it began."""

    # ---- life -----------------------------------------------------------------------------------------

    def do(self, action: Callable[[], None]) -> None:
        """Act now; when the process continues, if it stands still; never, if it has ended."""
        if self.is_frozen:
            self._waiting.append(action)
        elif self.is_alive:
            action()

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        self._world.after(seconds, lambda: self.do(action))

    def end(self, why: str, code: int = _KILLED) -> None:
        if not self.is_alive:
            return
        self._world.note(f"process of rank {self.rank} ends: {why}")
        self.is_alive = self.is_frozen = False
        if self._connection is not None:
            self._connection.up.send(None)
        self._leave()
        self._host.replace(self.rank, code)

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
        if not self.is_alive:
            return
        if not self._host.control.accepts(self.rank):
            self.later(_RETRY_EVERY_S, self.connect)
            return
        self.reported.add("connected")
        self._groups = self._host.groups
        self._connection = self._host.control.connect(self.rank, lambda said: self.do(partial(self._read, said)))
        self._link = HeadLink(self._connection.up.send)
        self._heard_ns = self._world.now_ns
        self._watch_head()
        self._say(hello(self.rank, self._host.grid.size, ARCH, host_of("here", name="host")))

    def _read(self, message: wire.FromHead | None) -> None:
        self._heard_ns = self._world.now_ns
        if message is None:
            self.end("the head is gone", EXIT_HEAD_GONE)
            return
        assert self._link is not None
        self._link.handle_message(self._world.now_ns, message)
        while self.is_alive and not self._link.inbox.empty():
            self._take(self._link.inbox.get()[1])
        if isinstance(message, wire.Masks | wire.Cancel):
            self._compute()

    def _watch_head(self) -> None:
        """Watch as a socket with a timeout does that is read."""
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
                self.end("told to end", code)
            case wire.Assign(layout):
                assert not self._epoch, "the head assigns layers to ranks that are in no epoch"
                self.layout = None
                self.later(self._world.between(0.05, 0.4), partial(self._load, layout))
            case wire.Form():
                self._enter(message)
            case wire.Abandon(epoch) if epoch == self._epoch:
                self._break("told by the head")
            case wire.Plan(plan) if plan.epoch == self._epoch:
                assert all(max(slice_.block_table, default=0) < self._num_blocks for slice_ in plan.slices)
                self._computing.send(plan)
                self._compute()

    def _lacks(self, what: Lack, layout: StageLayout) -> bool:
        return self._host.lack is what and layout.num_sublayers > MOST_SUBLAYERS

    def _load(self, layout: StageLayout) -> None:
        if self._lacks(Lack.LIFE, layout):
            self.end("too many layers")
        elif self._lacks(Lack.WEIGHTS, layout):
            self._say(wire.Unable("too many layers"))
        else:
            self.layout = layout
            num_blocks = NUM_BLOCKS // 4 if self._lacks(Lack.ROOM, layout) else NUM_BLOCKS - layout.num_sublayers
            self._say(wire.Loaded("cpu", 1, 1, 10, 10 * num_blocks, None))

    # ---- epochs ---------------------------------------------------------------------------------------

    def _enter(self, form: wire.Form) -> None:
        self._leave()
        assert self.layout == form.layout, "an epoch is of the layers that are loaded"
        if self._lacks(Lack.CACHE, form.layout):
            self._say(wire.Unable("no memory for a cache"))
            return
        self._epoch = epoch = form.epoch
        self._num_blocks = form.num_blocks
        self._is_last = form.layout.is_last
        self._computing.draws = self._is_last and self.tensor == 0
        if self.place == 0:
            self._say(wire.StoreOpened(epoch, 1))
        group = self._groups.setdefault(epoch, {})
        group[self.place] = self
        if len(group) == form.layout.num_places:
            for process in group.values():
                process.later(self._world.between(0.01, 0.1), partial(process.joined, epoch))
        self.later(_JOIN_WITHIN_S, lambda: self._give_up_joining(epoch))

    def joined(self, epoch: int) -> None:
        if epoch != self._epoch:
            return
        if self._host.network.stages_are_cut:
            self.later(1.0, lambda: self._give_up_joining(epoch))
            return
        self._is_ready = True
        self.reported.add("ready")
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
        if self._computes or not self._is_ready or self.rank in self._host.ends_after_s:
            return
        plan = self._computing.next_plan
        if plan is None or (self.stage and plan.step_id not in self._arrived):
            return
        assert self._link is not None
        if plan.awaits_masks:
            if (masks := self._link.masks_of(plan)) is None:
                return
            self._computing.masks = {plan.step_id: masks}
            plan = plan.with_masks(masks)
        skipped = plan.is_ahead and plan.step_id in self._link.cancelled
        poisoned = any(slice_.draw and slice_.draw.params.seed == POISON_SEED for slice_ in plan.slices)
        if self._is_last and poisoned and not skipped:
            self._break("step failed") if self._host.poison_breaks else self.end("poison")
            return
        if self._host.dies_of_requests == self.rank and plan.slices != (PROBE,):
            self.end("as of every request")
            return
        self._computes = True
        self._computing.skipped = {plan.step_id} if skipped else set()
        if not self.spins:
            begun_ns = self._world.now_ns
            seconds = self._world.between(0.5, 1.5) * self.slowness * (0.002 + 0.0001 * plan.num_tokens)
            self.later(0.0001 if skipped else seconds, lambda: self._computed(plan, begun_ns))

    def _computed(self, plan: StepPlan, begun_ns: int) -> None:
        if plan.epoch == self._epoch:
            self._gathers = plan, begun_ns
            self._gather(plan)

    def _gather(self, plan: StepPlan) -> None:
        """The last tensor rank of a stage that arrives lets all of them continue."""
        if plan.epoch != self._epoch or self._gathers is None or self._gathers[0] is not plan:
            return
        tensor, group = self._host.grid.tensor, self._groups[plan.epoch]
        if tensor > 1 and self._host.network.stages_are_cut:
            self.later(0.05, lambda: self._gather(plan))
            return
        ranks = [group[self.place - self.tensor + number] for number in range(tensor)]
        if all(rank._is_at(plan) for rank in ranks):
            for rank in ranks:
                rank.do(rank._finish)

    def _is_at(self, plan: StepPlan) -> bool:
        is_in_epoch = self.is_alive and self._epoch == plan.epoch
        return is_in_epoch and self._gathers is not None and self._gathers[0].step_id == plan.step_id

    def _finish(self) -> None:
        if self._gathers is None:  # it has left the epoch
            return
        (plan, begun_ns), self._gathers = self._gathers, None
        self._computes = False
        self.reported.add("served")
        now_ns = self._world.now_ns
        stamps = StepStamps(begun_ns, begun_ns, begun_ns, begun_ns, now_ns, now_ns)
        self._say(wire.Result(self._computing.compute_next(stamps)))
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
