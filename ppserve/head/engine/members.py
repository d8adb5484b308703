"""The members: every rank's state, and the current epoch. This is policy: messages and the time are arguments.

An epoch is one life of the pipeline between losses, in one shape (`Decision`). It is lost when a rank is lost or
reports a failed transport, also while it is forming. Then the surviving ranks leave it, keep their weights and are
LOADED again. The next epoch forms when every rank is LOADED, and so never with a rank that is dead or still waits
in the epoch before. After `reshape` it has another shape: each rank loads its new layers as soon as it has left
the epoch before. If the shape cannot be had before an epoch of it has formed, it is taken back (`reshaping`). No
rank that the shape does not use ends the pipeline.

A rank that asks for an invalid change of state (`member`) loses its connection. A pipeline that will not form
again raises UsageError if the operator's configuration is at fault, else StagesLost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future

from ppserve import wire
from ppserve.core.architecture import Split
from ppserve.core.grid import RankGrid
from ppserve.core.plan import RankResult
from ppserve.errors import ConfigError, StagesLost, UsageError, WireError
from ppserve.head.engine import patience
from ppserve.head.engine.control import ControlPlane, LossCause
from ppserve.head.engine.member import Decision, EpochLost, Member, MemberEvent, StageState, round_trip
from ppserve.head.engine.placement import count_blocks, what_changed
from ppserve.head.engine.ranks import Ranks
from ppserve.head.engine.reshaping import Reshape, Shape

log = logging.getLogger("ppserve.members")

# In these states a stage answers within milliseconds.
_QUICK = (StageState.READY, StageState.LEAVING)


class Members(Ranks):
    """The ranks of one pipeline, and its epochs. Only the engine's thread changes them.

    Any thread may read `all`, `formed` and `decision`, and call `is_healthy`.
    """

    def __init__(
        self,
        grid: RankGrid,
        machine: str,
        decide: Callable[[tuple[wire.Hello, ...], Split | None], Decision],
        control: ControlPlane,
        replica: int = 0,
    ) -> None:
        """grid: the world's. machine: the head's; ranks on it have the head's clock. decide: returns a shape for
        the Hello of every rank, and for a division of the layers (None: the one that it finds best)."""
        super().__init__(grid, control, replica)
        self.epoch = 0
        self.formed = False
        self._reshape: Reshape | None = None  # the one to the present shape, until an epoch of that has formed
        self._shape_began_ns = 0
        self._forming = self._worked = False  # worked: this epoch has computed a step
        self._draining = False
        self._silence = patience.Silence(self.ranks)
        self._attempts = patience.Attempts()
        self._machine = machine
        self._decide = decide

    # ---- commands ----

    def start_draining(self) -> None:
        """Note that the server stops: a lost rank must come back sooner."""
        self._draining = True

    def restart(self) -> None:
        """End all stage processes. Their keepers start others."""
        for rank in self.ranks:
            self._control.drop(rank, LossCause.RESTART)

    def reshape(self, split: Split, formed: Future[int], now_ns: int) -> EpochLost | None:
        """Divide the layers anew: the present epoch ends, and the next one has this split.

        With fewer stages than before, the last ranks wait without being used, and keep the weights that they have.
        formed: gets the number of that next epoch once it has formed. If the shape cannot be had, it gets a
        ReshapeFailed, and the pipeline returns to the latest shape of which an epoch had formed.
        If this raises ConfigError, it has changed nothing.
        """
        assert self.decision is not None, "before the first epoch there is no shape to change"
        decision = self._decide(self._hellos(self.all), split)
        if problem := self._what_prevents(decision):
            raise ConfigError("--layers", problem)
        before = Shape(self.decision, self.num_blocks)
        if self._reshape is not None:
            before = self._reshape.before
            self._reshape.fail("another reshape took its place")
        self._reshape = Reshape(before, formed)
        log.info("the layers are divided anew: %s", decision.layers)
        return self._use_shape(Shape(decision, None), now_ns)

    def end(self, reason: Exception) -> None:
        """Note that no epoch will form any more."""
        reshape, self._reshape = self._reshape, None
        if reshape is not None:
            reshape.formed.set_exception(reason)

    def _use_shape(self, shape: Shape, now_ns: int) -> EpochLost | None:
        """End the present epoch, and have ranks load what they have in this shape."""
        self.decision, self.num_blocks = shape.decision, shape.num_blocks
        self._shape_began_ns = now_ns
        self._attempts.start_anew()
        was_formed = self._end_epoch(now_ns, is_patient=True)
        for member in self.all:
            self._assign_if_outdated(member, now_ns)
        return EpochLost() if was_formed else None

    def _take_back(self, reason: str, now_ns: int) -> bool:
        """Go back to the shape before, if the present one has not formed yet. Return whether this was so. Raises
        StagesLost if that shape cannot be had either."""
        reshape, self._reshape = self._reshape, None
        if reshape is None:
            return False
        log.error("the layers are not divided anew, but as before: %s", reason)
        reshape.fail(reason)
        self._use_shape(reshape.before, now_ns)
        if problem := self._what_prevents(reshape.before.decision):
            raise StagesLost(problem)
        return True

    def _take_back_after(self, setback: str, now_ns: int) -> bool:
        """Count a setback. Return whether a shape that has not formed yet is taken back for it."""
        if self._reshape is None or not self._reshape.count_setback():
            return False
        return self._take_back(f"{setback}, as the last of {self._reshape.num_setbacks} setbacks", now_ns)

    # ---- events ----

    def handle_message(self, rank: int, now_ns: int, message: wire.FromStage) -> MemberEvent | None:
        """Handle a rank's message. One that asks for an invalid change of state ends the connection."""
        self._silence.end(rank, now_ns)
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
            case wire.Unable(reason):
                self._handle_unable(member, reason, now_ns)
            case wire.Failed(reason):
                self._move(member.rank, StageState.ABSENT, now_ns)
                self._give_up(member, self._final(reason), now_ns)
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
        problem = f"{self.grid.name(member.rank)}: {cause}"
        if cause != LossCause.RESTART and self._take_back_after(problem, now_ns):
            return None
        # A process that never finishes a step has not died, so its keeper does not count it.
        return self._lose_epoch(problem, None, now_ns, is_error=cause == LossCause.STUCK)

    def tick(self, now_ns: int) -> EpochLost | None:
        """Ping all ranks every 0.5 s, and cut off those that have been silent for too long."""
        if self._silence.tick(now_ns):
            self._control.send(self.ranks, wire.Ping(now_ns))
        lost = None
        for member in self.all:
            if member.state is StageState.ABSENT:
                self._check_absence(member, now_ns)
            elif cause := self._overdue(member, now_ns):
                self._control.drop(member.rank, cause)
            elif member.state is StageState.READY and self._silence.of(member.rank, now_ns) > patience.SILENT_NS:
                lost = self._lose_epoch(f"{self.grid.name(member.rank)}: silent", None, now_ns) or lost
        self._form_if_complete(now_ns)
        return lost

    def _check_absence(self, member: Member, now_ns: int) -> None:
        # Before the first epoch a rank may download for a long time. If it dies, its keeper says so.
        if not self.epoch or not self.uses(member.rank):
            return
        patience_ns = patience.REJOIN_WHILE_DRAINING_NS if self._draining else patience.REJOIN_WITHIN_NS
        if self._reshape is not None:
            patience_ns = min(patience_ns, patience.RESHAPE_WITHIN_NS)
        # While no shape used the rank, nothing waited for it.
        if now_ns - max(member.since_ns, self._shape_began_ns) > patience_ns:
            problem = f"{self.grid.name(member.rank)} did not come back in time"
            if not self._take_back(problem, now_ns):
                raise StagesLost(problem)

    def _overdue(self, member: Member, now_ns: int) -> LossCause | None:
        """Return why a connected rank must be cut off; None if it need not be."""
        limit_ns = patience.CUT_OFF_NS if member.state in _QUICK else patience.SILENT_BEFORE_NS
        if self._silence.of(member.rank, now_ns) > limit_ns:
            return LossCause.FROZEN
        if member.due_ns is not None and now_ns > member.due_ns:
            return LossCause.LATE if member.state is StageState.FORMING else LossCause.STUCK
        return None

    def head_paused(self, now_ns: int) -> bool:
        """Return whether the head itself did not run, so that silence says nothing about ranks."""
        return self._silence.head_paused(now_ns)

    def is_healthy(self, now_ns: int) -> bool:
        """Return whether every rank serves and was heard lately. If the engine hangs, it has heard none."""
        longest_ns = max(self._silence.of(rank, now_ns) for rank in self.ranks_in_use)
        return self.formed and longest_ns < patience.HEALTHY_WITHIN_NS

    # ---- changes of state ----

    def _handle_hello(self, member: Member, hello: wire.Hello, now_ns: int) -> None:
        problem = None
        if hello.world_size != self.grid.size:
            problem = f"belongs to {hello.world_size} ranks"
        elif self.decision is not None and member.hello is not None:
            change = what_changed(member.hello, hello)
            problem = None if change is None else f"came back with {change}"
        self._move(member.rank, StageState.LOADING, now_ns, layout=None, round_trips=(), unusable=None)
        if problem is not None:
            self._give_up(member, UsageError(f"{self.grid.name(member.rank)} {problem}"), now_ns)
            return
        self._update(member.rank, hello=hello)
        if self.decision is not None:
            self._assign_if_outdated(self[member.rank], now_ns)
        elif len(hellos := self._hellos(self.all)) == len(self.all):
            self.decision = self._decide(hellos, None)
            for other in self.all:
                self._assign_if_outdated(other, now_ns)

    def _handle_unable(self, member: Member, reason: str, now_ns: int) -> None:
        """Handle that a rank cannot load its layers, or has no memory for an epoch. Raises StagesLost or
        UsageError if there is no shape before this one."""
        is_loading = member.state is StageState.LOADING
        concerns_shape = member.layout == self._layout(member) and member.state is not StageState.LEAVING
        match member.state:
            case StageState.LOADING if member.layout is not None:
                self._update(member.rank, layout=None)
            case StageState.FORMING | StageState.LEAVING:
                self._move(member.rank, StageState.LOADED, now_ns)
            case state:
                raise WireError(f"rank {member.rank} is {state.name}, and is asked for nothing")
        if not concerns_shape:
            self._assign_if_outdated(self[member.rank], now_ns)
            self._form_if_complete(now_ns)
        elif not self._take_back(reason, now_ns):
            if is_loading or self.epoch == 1:
                raise self._final(reason)
            # The rank has served in this shape, and only a new process may have the memory again.
            self._control.drop(member.rank, LossCause.RESTART)

    def _final(self, reason: str) -> UsageError | StagesLost:
        return StagesLost(reason) if self.epoch else UsageError(reason)

    def _give_up(self, member: Member, error: UsageError | StagesLost, now_ns: int) -> None:
        """Note that a rank cannot serve. Raise `error` if the only shape needs it, and StagesLost if the shape
        before needs it, too."""
        self._update(member.rank, unusable=str(error))
        log.error("%s cannot be used: %s", self.grid.name(member.rank), error)
        if self.uses(member.rank) and not self._take_back(str(error), now_ns):
            raise error

    def _handle_loaded(self, member: Member, loaded: wire.Loaded, now_ns: int) -> None:
        # A rank that is FORMING becomes LOADED by `Broken` only.
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

    def _form_if_complete(self, now_ns: int) -> None:
        """Begin an epoch if all ranks have loaded its layers. The first rank enters it first, as it opens the
        store."""
        decision = self.decision
        is_complete = all(
            member.state is StageState.LOADED and member.layout == self._layout(member) for member in self.in_use
        )
        if not self._attempts.may_begin(now_ns) or decision is None or not is_complete:
            return
        if self.num_blocks is None:
            # The number is fixed while the shape stays: block tables must fit a stage that was replaced.
            loaded = tuple(member.loaded for member in self.in_use if member.loaded is not None)
            try:
                self.num_blocks = count_blocks(decision, loaded)
            except ConfigError as error:
                if not self._take_back(str(error), now_ns):
                    raise
                return
        self.epoch += 1
        self._forming = True
        self._worked = False
        self._send_form(self.first, None, now_ns)

    def _send_form(self, member: Member, store_port: int | None, now_ns: int) -> None:
        form = self._form_of(member, self.epoch, store_port)
        self._move(member.rank, StageState.FORMING, now_ns, patience.FORM_WITHIN_NS)
        self._control.send((member.rank,), form)

    def _handle_ready(self, member: Member, ready: wire.Ready, now_ns: int) -> wire.Ready | None:
        if ready.epoch != self.epoch or member.state is not StageState.FORMING:
            return None
        self._move(member.rank, StageState.READY, now_ns)
        if any(other.state is not StageState.READY for other in self.in_use):
            return None
        self.formed = True
        self._forming = False
        if self._reshape is not None:
            self._reshape.formed.set_result(self.epoch)
            self._reshape = None
        return ready

    def _handle_broken(self, member: Member, broken: wire.Broken, now_ns: int) -> EpochLost | None:
        is_in_epoch = member.state in (StageState.FORMING, *_QUICK)
        if broken.epoch != self.epoch or not is_in_epoch:
            return None
        self._move(member.rank, StageState.LOADED, now_ns)
        if member.state is not StageState.LEAVING:
            if self._take_back_after(broken.reason, now_ns):
                return None
            return self._lose_epoch(broken.reason, member.rank, now_ns, is_error=True)
        self._assign_if_outdated(self[member.rank], now_ns)
        self._form_if_complete(now_ns)
        return None

    def _lose_epoch(self, cause: str, rank: int | None, now_ns: int, is_error: bool = False) -> EpochLost | None:
        """End the epoch, if there is one, and decide when the next one may form. rank: as in `EpochLost`.
        is_error: as in `Attempts.fail`. Raises StagesLost after too many attempts."""
        was_forming, attempts = self._forming, self._attempts
        if not (self.formed or was_forming):
            return None
        was_formed = self._end_epoch(now_ns)
        has_failed = attempts.fail(now_ns, was_forming=was_forming, is_error=is_error, worked=self._worked)
        log.warning("epoch %d %s: %s", self.epoch, "was lost" if was_formed else "did not form", cause)
        if attempts.are_over:
            problem = f"the pipeline did not compute a step in {patience.MAX_ATTEMPTS} attempts"
            raise StagesLost(f"{problem}; the last one: {cause}")
        if has_failed and attempts.need_new_processes:
            self.restart()
        return EpochLost(rank) if was_formed else None

    def _end_epoch(self, now_ns: int, is_patient: bool = False) -> bool:
        """Tell the surviving ranks to leave in time, or they are cut off. Return whether the epoch had formed.
        is_patient: they have as long for one that was forming."""
        was_formed = self.formed
        self.formed = self._forming = False
        is_patient |= was_formed
        within_ns = patience.LEAVE_WITHIN_NS if is_patient else patience.LEAVE_FORMING_WITHIN_NS
        for member in self.all:
            if member.state in (StageState.FORMING, StageState.READY):
                self._control.send((member.rank,), wire.Abandon(self.epoch))
                self._move(member.rank, StageState.LEAVING, now_ns, within_ns)
        return was_formed

    def _align_clock(self, member: Member, beat: wire.Heartbeat, now_ns: int) -> None:
        """Keep a round trip, unless the rank is on the head's machine and so has its clock."""
        if member.hello is not None and member.hello.host.machine != self._machine:
            trips = (*member.round_trips, round_trip(beat, now_ns))
            self._update(member.rank, round_trips=trips[-patience.NUM_ROUND_TRIPS :])
