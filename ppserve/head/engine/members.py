"""The members: every rank's state, and the current epoch. Policy only: messages and the time are arguments.

An epoch is one life of the pipeline between losses, in one shape (`Decision`). It is lost when a rank is lost or
reports a failed transport, also while it is forming. Then the surviving ranks leave it, keep their weights and are
LOADED again.
The next forms when every rank is LOADED, so never with one that is dead or still waits in the epoch before.
After `reshape` it has another shape: each rank loads its new layers as soon as it has left the epoch before.

A rank that asks for an invalid change of state (`member`) loses its connection. A pipeline that will not form
again raises UsageError if the operator's configuration is at fault, else StagesLost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ppserve import wire
from ppserve.core.architecture import Split, StageLayout
from ppserve.core.grid import RankGrid
from ppserve.core.plan import RankResult
from ppserve.errors import StagesLost, UsageError, WireError
from ppserve.head.engine import patience
from ppserve.head.engine.control import ControlPlane, LossCause
from ppserve.head.engine.member import Decision, EpochLost, Member, MemberEvent, StageState
from ppserve.head.engine.placement import count_blocks, stage_addresses, what_changed

log = logging.getLogger("ppserve.members")

# In these states a stage answers within milliseconds.
_QUICK = (StageState.READY, StageState.LEAVING)


class Members:
    """The ranks of one pipeline. Changed by the engine's thread alone.

    Any thread may read `all`, `formed` and `decision`, which are replaced as a whole, and `is_healthy`.
    """

    def __init__(
        self,
        grid: RankGrid,
        machine: str,
        decide: Callable[[tuple[wire.Hello, ...], Split | None], Decision],
        control: ControlPlane,
        replica: int = 0,
    ) -> None:
        """grid: the world's. machine: the head's, with its clock. decide: called with the ranks' greetings, and
        with how the layers are to be divided (None: as it sees fit). Raises ConfigError."""
        self.grid = grid
        self.replica = replica
        self.ranks = grid.ranks_of(replica)  # by stage, then by tensor rank: their places
        self._place = {rank: place for place, rank in enumerate(self.ranks)}
        self.all = tuple(Member(rank, at.stage, at.tensor) for rank in self.ranks for at in (grid.place(rank),))
        self.epoch = 0
        self.formed = False
        self.decision: Decision | None = None
        self.num_blocks: int | None = None  # of the decision's epochs; None before the first of them
        self._forming = self._worked = False  # worked: this epoch has computed a step
        self._fruitless = 0  # epochs since the last step that formed and ended by an error
        self._attempts = 0  # these, and the latest in a row that did not form
        self._draining = False
        self._heard_ns = dict.fromkeys(self.ranks, 0)
        self._pinged_ns = self._ticked_ns = self._settled_ns = 0
        self._machine = machine
        self._decide = decide
        self._control = control

    def __getitem__(self, rank: int) -> Member:
        return self.all[self._place[rank]]

    @property
    def in_use(self) -> tuple[Member, ...]:
        """The ranks that compute in the present shape, by their places: all, or the first ones."""
        if self.decision is None:
            return self.all
        return self.all[: self.decision.num_stages * self.grid.tensor]

    @property
    def ranks_in_use(self) -> tuple[int, ...]:
        return self.ranks[: len(self.in_use)]

    def uses(self, rank: int) -> bool:
        """Whether this rank computes in the present shape."""
        return self._place[rank] < len(self.in_use)

    @property
    def first(self) -> Member:
        """The first stage's rank, which opens each epoch's store."""
        return self.all[0]

    # ---- commands ----

    def start_draining(self) -> None:
        """Note that the server stops: a lost rank must come back sooner."""
        self._draining = True

    def restart(self) -> None:
        """End all stage processes. Their keepers start others."""
        for rank in self.ranks:
            self._control.drop(rank, LossCause.RESTART)

    def reshape(self, split: Split, now_ns: int) -> EpochLost | None:
        """Divide the layers anew: the present epoch ends, and the next one has this split.

        With fewer stages than before, the last ranks wait without being used, and keep the weights that they have.
        Raise ConfigError, and then change nothing.
        """
        assert self.decision is not None, "before the first epoch there is no shape to change"
        self.decision = self._decide(self._hellos(self.all), split)
        self.num_blocks = None
        was_formed = self._end_epoch(now_ns)
        log.info("the layers are divided anew: %s", self.decision.layers)
        for member in self.all:
            self._assign_if_outdated(member, now_ns)
        return EpochLost() if was_formed else None

    # ---- events ----

    def handle_message(self, rank: int, now_ns: int, message: wire.FromStage) -> MemberEvent | None:
        """Handle a rank's message. One that asks for an invalid change of state ends the connection."""
        self._heard_ns[rank] = now_ns
        try:
            return self._handle(self[rank], now_ns, message)
        except WireError as error:
            log.warning("%s: its connection is ended", error)
            self._control.drop(rank, LossCause.PROTOCOL)
            return None

    def _handle(self, member: Member, now_ns: int, message: wire.FromStage) -> MemberEvent | None:
        match message:
            case wire.Result(result):
                return self._handle_result(member, result)
            case wire.Heartbeat():
                self._align_clock(member, message, now_ns)
            case wire.Hello():
                self._handle_hello(member, message, now_ns)
            case wire.Loading():
                self._update(member.rank, progress=(message.done_bytes, message.total_bytes))
            case wire.Loaded():
                self._handle_loaded(member, message, now_ns)
            case wire.StoreOpened():
                self._handle_store(message, now_ns)
            case wire.Ready():
                return self._handle_ready(member, message, now_ns)
            case wire.Broken():
                return self._handle_broken(member, message, now_ns)
            case wire.Failed():
                if self.epoch:
                    raise StagesLost(message.reason)
                raise UsageError(message.reason)
        return None

    def handle_disconnect(self, rank: int, cause: LossCause, now_ns: int) -> EpochLost | None:
        """Note that a stage process has died. Its keeper starts another."""
        member = self[rank]
        self._move(rank, StageState.ABSENT, now_ns)
        if not self.epoch:
            return None
        self._update(rank, restarts=member.restarts + 1)
        if not self.uses(member.rank):
            return None
        # For its keeper, a process that never finishes a step does not die.
        return self._lose_epoch(
            f"{self.grid.name(rank)}: {cause}", None, now_ns, is_error=cause == LossCause.STUCK
        )

    def tick(self, now_ns: int) -> EpochLost | None:
        """Pings all ranks every 0.5 s, and cuts off those that are silent too long."""
        if self.head_paused(now_ns):
            self._heard_ns = dict.fromkeys(self.ranks, now_ns)
        self._ticked_ns = now_ns
        if now_ns - self._pinged_ns >= patience.PING_EVERY_NS:
            self._pinged_ns = now_ns
            self._control.send(self.ranks, wire.Ping(now_ns))
        lost = None
        for member in self.all:
            if member.state is StageState.ABSENT:
                self._check_absence(member, now_ns)
            elif cause := self._overdue(member, now_ns):
                self._control.drop(member.rank, cause)
            elif member.state is StageState.READY and now_ns - self._heard_ns[member.rank] > patience.SILENT_NS:
                lost = self._lose_epoch(f"{self.grid.name(member.rank)}: silent", None, now_ns) or lost
        self._form_if_complete(now_ns)
        return lost

    def _check_absence(self, member: Member, now_ns: int) -> None:
        # Before the first epoch a rank may download for long; its keeper says if it dies.
        patience_ns = patience.REJOIN_WHILE_DRAINING_NS if self._draining else patience.REJOIN_WITHIN_NS
        if self.epoch and self.uses(member.rank) and now_ns - member.since_ns > patience_ns:
            raise StagesLost(f"{self.grid.name(member.rank)} did not come back in time")

    def _overdue(self, member: Member, now_ns: int) -> LossCause | None:
        """Return why a connected rank must be cut off; None if it need not be."""
        limit_ns = patience.CUT_OFF_NS if member.state in _QUICK else patience.SILENT_BEFORE_NS
        if now_ns - self._heard_ns[member.rank] > limit_ns:
            return LossCause.FROZEN
        if member.due_ns is not None and now_ns > member.due_ns:
            return LossCause.LATE if member.state is StageState.FORMING else LossCause.STUCK
        return None

    def head_paused(self, now_ns: int) -> bool:
        """Whether the head did not run, so silence says nothing about ranks."""
        return now_ns - self._ticked_ns > patience.PAUSE_NS

    def is_healthy(self, now_ns: int) -> bool:
        """Whether every rank serves and was heard lately: by a hanging engine, none."""
        oldest_ns = min(self._heard_ns[rank] for rank in self.ranks_in_use)
        return self.formed and now_ns - oldest_ns < patience.HEALTHY_WITHIN_NS

    # ---- changes of state ----

    def _update(self, rank: int, **changes: Any) -> None:
        self.all = tuple(replace(other, **changes) if other.rank == rank else other for other in self.all)

    def _move(
        self, rank: int, state: StageState, now_ns: int, within_ns: int | None = None, **changes: Any
    ) -> None:
        """Change a rank's state. within_ns: how long it may stay in the new one before it is cut off; None = for
        ever. Raise WireError, and then change nothing."""
        self[rank].check_move(state)
        due_ns = None if within_ns is None else now_ns + within_ns
        self._update(rank, state=state, since_ns=now_ns, due_ns=due_ns, **changes)

    def _handle_hello(self, member: Member, hello: wire.Hello, now_ns: int) -> None:
        name = self.grid.name(member.rank)
        if hello.world_size != self.grid.size:
            raise UsageError(f"{name} belongs to {hello.world_size} ranks")
        self._move(member.rank, StageState.LOADING, now_ns, hello=hello, layout=None, round_trips=())
        if self.decision is not None:
            if member.hello is not None and (change := what_changed(member.hello, hello)):
                raise UsageError(f"{name} came back with {change}")
            self._assign_if_outdated(self[member.rank], now_ns)
        elif len(hellos := self._hellos(self.all)) == len(self.all):
            self.decision = self._decide(hellos, None)
            for other in self.all:
                self._assign_if_outdated(other, now_ns)

    def _handle_loaded(self, member: Member, loaded: wire.Loaded, now_ns: int) -> None:
        # From FORMING only `Broken` leads to LOADED.
        if member.state is not StageState.LOADING or member.layout is None:
            raise WireError(f"rank {member.rank} is {member.state.name} and has loaded weights")
        self._move(member.rank, StageState.LOADED, now_ns, loaded=loaded)
        self._assign_if_outdated(self[member.rank], now_ns)
        self._form_if_complete(now_ns)

    def _handle_store(self, opened: wire.StoreOpened, now_ns: int) -> None:
        if opened.epoch == self.epoch and self.first.state is StageState.FORMING:
            for other in self.in_use[1:]:
                self._send_form(other, opened.port, now_ns)

    def _handle_result(self, member: Member, result: RankResult) -> RankResult | None:
        if not self.formed or (result.epoch, result.place) != (self.epoch, self._place[member.rank]):
            return None
        assert self.decision is not None
        self._worked |= member.stage == self.decision.num_stages - 1
        return member.on_head_clock(result)

    def _hellos(self, members: Sequence[Member]) -> tuple[wire.Hello, ...]:
        return tuple(member.hello for member in members if member.hello is not None)

    def _layout(self, member: Member) -> StageLayout | None:
        """The layers that a rank has in the present shape; None if it is not used."""
        if self.decision is None or not self.uses(member.rank):
            return None
        layout = self.decision.layouts[member.stage]
        return replace(layout, tensor=member.tensor, num_tensor=self.grid.tensor)

    def _assign_if_outdated(self, member: Member, now_ns: int) -> None:
        """Tell a rank to load its layers, unless it has them or is busy: then once it has left its epoch, or has
        loaded the layers before them."""
        is_waiting = member.state is StageState.LOADING and member.layout is None
        layout = self._layout(member)
        if layout in (None, member.layout) or not (is_waiting or member.state is StageState.LOADED):
            return
        if not is_waiting:
            self._move(member.rank, StageState.LOADING, now_ns)
        self._update(member.rank, layout=layout)
        self._control.send((member.rank,), wire.Assign(layout))

    def _form_if_complete(self, now_ns: int) -> None:
        """Begin an epoch when all ranks have loaded its layers, with the first: it opens the store."""
        decision = self.decision
        is_complete = all(
            member.state is StageState.LOADED and member.layout == self._layout(member) for member in self.in_use
        )
        if now_ns < self._settled_ns or decision is None or not is_complete:
            return
        if self.num_blocks is None:
            # Fixed while the shape stays: block tables must fit a stage that was replaced.
            loaded = tuple(member.loaded for member in self.in_use if member.loaded is not None)
            self.num_blocks = count_blocks(decision, loaded)
        self.epoch += 1
        self._forming = True
        self._worked = False
        self._send_form(self.first, None, now_ns)

    def _send_form(self, member: Member, store_port: int | None, now_ns: int) -> None:
        decision = self.decision
        assert decision is not None
        assert member.layout is not None
        assert self.num_blocks is not None
        # Anew: a stage that was replaced may have another address.
        addresses = stage_addresses(self._hellos(self.in_use), self.grid)
        self._move(member.rank, StageState.FORMING, now_ns, patience.FORM_WITHIN_NS)
        form = wire.Form(
            epoch=self.epoch,
            layout=member.layout,
            num_blocks=self.num_blocks,
            max_rows=decision.scheduling.max_step_tokens,
            transport=decision.transport,
            store_host=addresses[0],
            store_port=store_port,
            address=addresses[self._place[member.rank]],
        )
        self._control.send((member.rank,), form)

    def _handle_ready(self, member: Member, ready: wire.Ready, now_ns: int) -> wire.Ready | None:
        if ready.epoch != self.epoch or member.state is not StageState.FORMING:
            return None
        self._move(member.rank, StageState.READY, now_ns)
        if any(other.state is not StageState.READY for other in self.in_use):
            return None
        self.formed = True
        self._forming = False
        return ready

    def _handle_broken(self, member: Member, broken: wire.Broken, now_ns: int) -> EpochLost | None:
        is_in_epoch = member.state in (StageState.FORMING, *_QUICK)
        if broken.epoch != self.epoch or not is_in_epoch:
            return None
        self._move(member.rank, StageState.LOADED, now_ns)
        if member.state is not StageState.LEAVING:
            return self._lose_epoch(broken.reason, member.rank, now_ns, is_error=True)
        self._assign_if_outdated(self[member.rank], now_ns)
        self._form_if_complete(now_ns)
        return None

    def _lose_epoch(self, cause: str, rank: int | None, now_ns: int, is_error: bool = False) -> EpochLost | None:
        """End the epoch, if there is one, and decide when the next one may form. rank: as in `EpochLost`.
        is_error: a rank reported an error or never finished a step; deaths are counted by keepers. Raise
        StagesLost."""
        was_forming = self._forming
        if not (self.formed or was_forming):
            return None
        was_formed = self._end_epoch(now_ns)
        is_fruitless = was_formed and is_error and not self._worked
        self._fruitless = 0 if self._worked else self._fruitless + is_fruitless
        self._attempts = self._attempts + 1 if was_forming else self._fruitless
        self._settled_ns = now_ns + min(patience.SETTLE_NS << self._attempts, patience.SETTLE_AT_MOST_NS)
        log.warning("epoch %d %s: %s", self.epoch, "was lost" if was_formed else "did not form", cause)
        if self._attempts == patience.MAX_ATTEMPTS:
            problem = f"the pipeline did not compute a step in {patience.MAX_ATTEMPTS} attempts"
            raise StagesLost(f"{problem}; the last one: {cause}")
        if (was_forming or is_fruitless) and self._attempts % patience.RESTART_EVERY == 0:
            self.restart()
        return EpochLost(rank) if was_formed else None

    def _end_epoch(self, now_ns: int) -> bool:
        """Tell the surviving ranks to leave in time, or they are cut off. Return whether the epoch had formed."""
        was_formed = self.formed
        self.formed = self._forming = False
        within_ns = patience.LEAVE_WITHIN_NS if was_formed else patience.LEAVE_FORMING_WITHIN_NS
        for member in self.all:
            if member.state in (StageState.FORMING, StageState.READY):
                self._control.send((member.rank,), wire.Abandon(self.epoch))
                self._move(member.rank, StageState.LEAVING, now_ns, within_ns)
        return was_formed

    def _align_clock(self, member: Member, beat: wire.Heartbeat, now_ns: int) -> None:
        """Keeps a round trip. Ranks on the head's machine have its clock."""
        if member.hello is not None and member.hello.host.machine != self._machine:
            offset_ns = beat.clock_ns - (beat.echo_ns + now_ns) // 2
            trips = (*member.round_trips, (now_ns - beat.echo_ns, offset_ns))
            self._update(member.rank, round_trips=trips[-patience.NUM_ROUND_TRIPS :])
