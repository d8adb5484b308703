"""Which stages live, and which epoch it is. Policy only: messages and the time come in, messages go out.

A stage's way, and the only moves there are:

    ABSENT ──Hello──▶ LOADING ──Loaded──▶ LOADED ──Form──▶ FORMING ──Ready──▶ READY
       ▲                                    ▲                  └───epoch lost────┤
       │                                    │                                    ▼
       └── connection ends (any state)      └─────────────Broken───────────── LEAVING

An epoch is one life of the pipeline. It is lost when any of its stages is lost or reports a broken wire,
also while it is forming. The survivors are told to leave it; one that says it has is LOADED again, its
weights in place, and the next epoch forms once every stage is. So no epoch ever forms around a dead stage,
or around one that still waits for a neighbour of the last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from ppserve import wire
from ppserve.core.architecture import StageLayout
from ppserve.core.ledger.account import in_head_clock
from ppserve.core.plan import StepResult
from ppserve.errors import UsageError

log = logging.getLogger("ppserve.members")

_PING_EVERY_NS = 500_000_000
_SILENT_WHEN_READY_NS = 3_000_000_000
# Compiling kernels and reading weights may keep a stage from answering for a while.
_SILENT_BEFORE_NS = 30_000_000_000
_FORM_WITHIN_NS = 30_000_000_000
_REJOIN_WITHIN_NS = 120_000_000_000
# torchrun's answer to the death of a keeper is to end all ranks, and the head takes that for a wish to drain;
# but a stage without a keeper never comes back.
_REJOIN_WHILE_DRAINING_NS = 10_000_000_000
# A stage that is asked to leave may have a step to finish, or a wait in gloo that ends by itself (see
# `stage.loop`). One that was only forming has nothing to finish: what holds it is a wait in the library's
# connecting that nothing ends, and starting anew, with a reload of its weights, is quicker.
_LEAVE_WITHIN_NS = 25_000_000_000
_LEAVE_FORMING_WITHIN_NS = 2_000_000_000
# Between a loss and the next attempt: a wire that stays broken is not tried in a hot loop.
_SETTLE_NS = 200_000_000
_PAUSE_NS = 1_000_000_000
_HEALTHY_WITHIN_NS = 2_000_000_000


class StageState(Enum):
    ABSENT = auto()
    LOADING = auto()
    LOADED = auto()
    FORMING = auto()
    READY = auto()
    LEAVING = auto()


# Stages that answer within milliseconds: nothing that they do keeps them from it.
_QUICK = (StageState.READY, StageState.LEAVING)


@dataclass(frozen=True, slots=True)
class Decision:
    """What the head decides once it knows all stages: who loads what, and how they talk.

    store_host: where stage 0 opens each epoch's store; max_rows: tokens of the largest step.
    """

    layouts: tuple[StageLayout, ...]
    dtype: str
    transport: str
    store_host: str
    max_rows: int


@dataclass(frozen=True, slots=True)
class StepDone:
    """A stage's result, its stamps on the head's clock."""

    result: StepResult


@dataclass(frozen=True, slots=True)
class StageDied:
    """A stage process is gone; its keeper starts another."""

    stage: int
    cause: str


@dataclass(frozen=True, slots=True)
class EpochLost:
    """The pipeline broke: nothing that is in flight will return."""

    epoch: int
    cause: str


@dataclass(frozen=True, slots=True)
class Formed:
    """All stages are ready in this epoch; num_blocks: KV blocks that every stage has."""

    epoch: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Hopeless:
    """The pipeline will not form (again). usage: the operator's mistake rather than a failure."""

    reason: str
    usage: bool


MemberEvent = StepDone | StageDied | EpochLost | Formed | Hopeless


@dataclass(slots=True)
class Member:
    """What is known of one stage. clock_offset_ns: its clock minus the head's; progress: bytes loaded;
    leave_by_ns: when a LEAVING stage is given up."""

    stage: int
    state: StageState = StageState.ABSENT
    hello: wire.Hello | None = None
    loaded: wire.Loaded | None = None
    progress: tuple[int, int] = (0, 0)
    since_ns: int = 0
    heard_ns: int = 0
    leave_by_ns: int = 0
    clock_offset_ns: int = 0
    best_rtt_ns: int = 1 << 62
    restarts: int = 0


@dataclass(slots=True)
class Members:
    """All stages. `decide` turns their greetings into a Decision and raises UsageError where it cannot.

    send, drop: the control plane's. machine: the head's, whose clock needs no alignment. draining: running
    streams may finish, and then it is over.
    """

    num_stages: int
    machine: str
    decide: Callable[[tuple[wire.Hello, ...]], Decision]
    choose_num_blocks: Callable[[tuple[wire.Loaded, ...]], int]
    send: Callable[[int, wire.FromHead], None]
    drop: Callable[[int, str], None]
    epoch: int = 0
    formed: bool = False
    decision: Decision | None = None
    num_blocks: int = 0
    draining: bool = False
    stages: list[Member] = field(default_factory=list)
    _pinged_ns: int = 0
    _ticked_ns: int = 0
    _settled_ns: int = 0

    def __post_init__(self) -> None:
        self.stages = [Member(i) for i in range(self.num_stages)]

    # ---- what happens ---------------------------------------------------------------------------------

    def start(self, now_ns: int) -> None:
        """From now on stages are expected."""
        self._ticked_ns = now_ns
        for member in self.stages:
            member.since_ns = member.heard_ns = now_ns

    def heard(self, stage: int, now_ns: int, message: Any) -> list[MemberEvent]:
        member = self.stages[stage]
        member.heard_ns = now_ns
        match message:
            case wire.Result(result):
                return [StepDone(self._on_head_clock(member, result))] if self._is_current(result.epoch) else []
            case wire.Heartbeat():
                self._align_clock(member, message, now_ns)
                return []
            case wire.Hello():
                return self._greet(member, message, now_ns)
            case wire.Loading():
                member.progress = (message.done_bytes, message.total_bytes)
                member.since_ns = now_ns
                return []
            case wire.Loaded():
                member.loaded = message
                self._move(member, StageState.LOADED, now_ns)
                return self._form_if_complete(now_ns)
            case wire.StoreOpened():
                return self._invite(message, now_ns)
            case wire.Ready():
                return self._ready(member, message, now_ns)
            case wire.Broken():
                return self._left(member, message, now_ns)
            case wire.Failed():
                return [Hopeless(message.reason, usage=self.decision is None or self.epoch == 0)]
            case wire.GaveUp():
                return [Hopeless(message.reason, usage=self.epoch == 0)]
        raise AssertionError(message)

    def gone(self, stage: int, cause: str, now_ns: int) -> list[MemberEvent]:
        """A stage's connection ended: its keeper is starting another."""
        member = self.stages[stage]
        self._move(member, StageState.ABSENT, now_ns)
        if not self.epoch:
            return []
        member.restarts += 1
        return [StageDied(stage, cause), *self._lose_epoch(f"stage {stage}: {cause}", now_ns)]

    def tick(self, now_ns: int) -> list[MemberEvent]:
        """Asks for signs of life, and gives up on those who give none."""
        if now_ns - self._ticked_ns > _PAUSE_NS:
            # It was the head that stood still: nobody else can be blamed for the silence.
            for member in self.stages:
                member.heard_ns = now_ns
        self._ticked_ns = now_ns
        if now_ns - self._pinged_ns >= _PING_EVERY_NS:
            self._pinged_ns = now_ns
            for member in self.stages:
                if member.state is not StageState.ABSENT:
                    self.send(member.stage, wire.Ping(now_ns))
        for member in self.stages:
            state, waited_ns = member.state, now_ns - member.since_ns
            silent_ns = _SILENT_WHEN_READY_NS if state in _QUICK else _SILENT_BEFORE_NS
            if state is StageState.ABSENT:
                # At first it may be downloading; a keeper whose stage keeps dying says so by itself.
                patience_ns = _REJOIN_WHILE_DRAINING_NS if self.draining else _REJOIN_WITHIN_NS
                if self.epoch and waited_ns > patience_ns:
                    return [Hopeless(f"stage {member.stage} did not come back in time", usage=False)]
            elif now_ns - member.heard_ns > silent_ns:
                self.drop(member.stage, "frozen")
            elif state is StageState.FORMING and waited_ns > _FORM_WITHIN_NS:
                self.drop(member.stage, "late")
            elif state is StageState.LEAVING and now_ns > member.leave_by_ns:
                self.drop(member.stage, "stuck")
        return self._form_if_complete(now_ns)

    def healthy(self, now_ns: int) -> bool:
        """Whether the pipeline is formed and every stage was heard of a moment ago."""
        return self.formed and all(now_ns - m.heard_ns < _HEALTHY_WITHIN_NS for m in self.stages)

    # ---- how it is done -------------------------------------------------------------------------------

    def _move(self, member: Member, state: StageState, now_ns: int) -> None:
        member.state = state
        member.since_ns = now_ns

    def _is_current(self, epoch: int) -> bool:
        return self.formed and epoch == self.epoch

    def _greet(self, member: Member, hello: wire.Hello, now_ns: int) -> list[MemberEvent]:
        if hello.num_stages != self.num_stages:
            return [Hopeless(f"stage {member.stage} belongs to {hello.num_stages} stages", usage=True)]
        before, member.hello = member.hello, hello
        member.clock_offset_ns, member.best_rtt_ns = 0, 1 << 62
        self._move(member, StageState.LOADING, now_ns)
        if self.decision is not None:
            if before is not None and before.architecture != hello.architecture:
                return [Hopeless(f"stage {member.stage} came back with another model", usage=True)]
            self.send(member.stage, wire.Assign(self.decision.layouts[member.stage], self.decision.dtype))
            return []
        hellos = [m.hello for m in self.stages if m.hello is not None]
        if len(hellos) < self.num_stages:
            return []
        try:
            self.decision = self.decide(tuple(hellos))
        except UsageError as error:
            return [Hopeless(str(error), usage=True)]
        for other in self.stages:
            self.send(other.stage, wire.Assign(self.decision.layouts[other.stage], self.decision.dtype))
        return []

    def _form_if_complete(self, now_ns: int) -> list[MemberEvent]:
        """Opens the next epoch once every stage has its weights: stage 0 first, it hosts the store."""
        if now_ns < self._settled_ns or any(m.state is not StageState.LOADED for m in self.stages):
            return []
        assert self.decision is not None
        if not self.num_blocks:
            # Fixed for good: a stage that comes back must fit the block tables that exist.
            try:
                self.num_blocks = self.choose_num_blocks(tuple(m.loaded for m in self.stages if m.loaded))
            except UsageError as error:
                return [Hopeless(str(error), usage=True)]
        self.epoch += 1
        self._send_form(self.stages[0], 0, now_ns)
        return []

    def _invite(self, opened: wire.StoreOpened, now_ns: int) -> list[MemberEvent]:
        if opened.epoch == self.epoch and self.stages[0].state is StageState.FORMING:
            for member in self.stages[1:]:
                self._send_form(member, opened.port, now_ns)
        return []

    def _send_form(self, member: Member, store_port: int, now_ns: int) -> None:
        decision = self.decision
        assert decision is not None
        form = wire.Form(
            self.epoch, decision.transport, self.num_blocks, decision.max_rows, decision.store_host, store_port
        )
        self.send(member.stage, form)
        self._move(member, StageState.FORMING, now_ns)

    def _ready(self, member: Member, ready: wire.Ready, now_ns: int) -> list[MemberEvent]:
        if ready.epoch != self.epoch or member.state is not StageState.FORMING:
            return []
        self._move(member, StageState.READY, now_ns)
        if any(m.state is not StageState.READY for m in self.stages):
            return []
        self.formed = True
        return [Formed(self.epoch, self.num_blocks)]

    def _left(self, member: Member, broken: wire.Broken, now_ns: int) -> list[MemberEvent]:
        """A stage has left the epoch: by itself, and then the epoch is lost, or because it was told to."""
        before = member.state
        if broken.epoch != self.epoch or before not in (StageState.FORMING, StageState.READY, StageState.LEAVING):
            return []
        self._move(member, StageState.LOADED, now_ns)
        if before is not StageState.LEAVING:
            return self._lose_epoch(broken.reason, now_ns)
        return self._form_if_complete(now_ns)

    def _lose_epoch(self, cause: str, now_ns: int) -> list[MemberEvent]:
        """The survivors are told to leave; they keep their weights and wait for the next epoch."""
        self._settled_ns = now_ns + _SETTLE_NS
        was_formed, self.formed = self.formed, False
        for member in self.stages:
            if member.state in (StageState.FORMING, StageState.READY):
                self.send(member.stage, wire.Abandon(self.epoch))
                within_ns = _LEAVE_WITHIN_NS if was_formed else _LEAVE_FORMING_WITHIN_NS
                member.leave_by_ns = now_ns + within_ns
                self._move(member, StageState.LEAVING, now_ns)
        if not was_formed:
            log.warning("epoch %d did not form: %s", self.epoch, cause)
            return []
        return [EpochLost(self.epoch, cause)]

    def _align_clock(self, member: Member, beat: wire.Heartbeat, now_ns: int) -> None:
        """Keeps the offset of the quickest round trip so far; processes of one machine share a clock."""
        rtt_ns = now_ns - beat.echo_ns
        same_clock = member.hello is not None and member.hello.machine == self.machine
        if not same_clock and rtt_ns < member.best_rtt_ns:
            member.best_rtt_ns = rtt_ns
            member.clock_offset_ns = beat.clock_ns - (beat.echo_ns + now_ns) // 2

    def _on_head_clock(self, member: Member, result: StepResult) -> StepResult:
        if not member.clock_offset_ns:
            return result
        return replace(result, stamps=in_head_clock(result.stamps, member.clock_offset_ns))
