"""One pipeline: its members, its scheduler, its steps and its ledger.

The replica sends the scheduler's plans, and passes results to the book of steps, the ledger, the cost model and
the scheduler. It does not know streams. All of it runs in the engine's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ppserve import wire
from ppserve.core.cost_model import Coefficients, StageCost, StepSize
from ppserve.core.ledger.account import Settled, StageTimes, TimeAccount
from ppserve.core.ledger.steps import Overheads, OverheadTimes, Step, Steps
from ppserve.core.ledger.tensor_ranks import TensorRanks
from ppserve.core.plan import StepPlan, StepResult
from ppserve.core.scheduling.block_manager import BlockManager
from ppserve.core.scheduling.request_queue import RequestQueue
from ppserve.core.scheduling.scheduler import Scheduler
from ppserve.core.scheduling.sequence import SequenceEvent
from ppserve.core.scheduling.slots import SlotCount
from ppserve.errors import Draining, StagesLost
from ppserve.head.engine.control import ControlPlane, Disconnected, LossCause, Received
from ppserve.head.engine.member import Decision, EpochLost, Member, MemberEvent
from ppserve.head.engine.members import Members

log = logging.getLogger("ppserve.engine")

# In a row without a token. A request that kills stages causes at most four (`PoisonIsolation`).
_MAX_FRUITLESS_LOSSES = 64


@dataclass(frozen=True, slots=True)
class ReplicaReading:
    """A replica at one moment. Tuples are by stage, and by a stage's ranks."""

    replica: int
    serves: bool  # all its stages are there
    epoch: int
    microbatches: int
    running: int  # sequences
    kv_usage: float  # 0 to 1
    num_waiting: int  # requests that no replica computes
    num_blocks: int
    decision: Decision
    overheads: OverheadTimes
    times: tuple[StageTimes, ...]
    steps: tuple[int, ...]  # computed since the start
    costs: tuple[Coefficients, ...]  # of a step, by its size
    ranks: tuple[tuple[Member, ...], ...]
    gathered_ns: tuple[tuple[int, ...], ...]  # what each rank has waited for the others
    now_ns: int  # on the engine's clock


class StepObserver:
    """Receives replicas' events in the engine's thread, and does nothing with them."""

    def on_step_sent(self, replica: int, step: Step) -> None:
        """A step was sent to all stages."""

    def on_step_reported(self, replica: int, step: Step, stage: int) -> None:
        """A stage's result of a step is in the book."""

    def on_span_settled(self, replica: int, settled: Settled) -> None:
        """The ledger attributed an interval of a stage's time."""

    def on_stage_died(self, replica: int, stage: int, cause: LossCause) -> None:
        """One of a stage's processes died."""

    def on_load(self, replica: int, scheduler: Scheduler, in_flight: int, num_waiting: int) -> None:
        """A turn ended. in_flight: steps. num_waiting: requests that no replica computes."""


class Replica:
    """One pipeline: it passes messages between its members, scheduler and ledger."""

    def __init__(
        self,
        members: Members,
        control: ControlPlane,
        observers: Sequence[StepObserver],
        clock: Callable[[], int],
        request_queue: RequestQueue,
    ) -> None:
        """clock: monotonic, in nanoseconds. request_queue: all replicas'."""
        num_stages = members.grid.pipeline
        self.number = members.replica
        self.members = members
        self.request_queue = request_queue
        self.scheduler: Scheduler | None = None  # until the first epoch has formed
        self.steps = Steps(num_stages)
        self._observers = observers
        self._ranks = TensorRanks(num_stages, members.grid.tensor)
        self._account = TimeAccount(self.steps, clock(), self._note_settled)
        self._overheads = Overheads(self.steps)
        self._costs = [StageCost() for _ in range(num_stages)]
        self._slot_count = SlotCount(self._costs)
        # Requests in flight at a loss, until it is known which rank failed.
        self._in_flight: frozenset[str] = frozenset()
        self._fruitless_losses = 0  # in a row
        # The latest result, until it is accounted for: after the next plan is sent.
        self._unaccounted: tuple[StepResult, Step] | None = None
        self._prefix = f"replica {self.number}: " if members.grid.data > 1 else ""
        self._control = control
        self._clock = clock

    # ---- requests ----

    @property
    def serves(self) -> bool:
        """Whether it has formed, and takes requests."""
        return self.members.formed and self.scheduler is not None and self.scheduler.is_open

    def note_demand(self, exists: bool) -> None:
        """exists: the server has work, so waiting stages have bubbles; else they are idle."""
        if exists:
            self._account.demand_began(self._clock())
        else:
            self._account_for_result()
            self._account.demand_ended(self._clock())

    def give_back(self) -> frozenset[str]:
        """All requests wait for the next epoch. Returns the ids of those in flight."""
        if self.scheduler is None or not self.scheduler.is_open:
            return frozenset()
        if num_running := self.scheduler.num_running:
            log.info("%s%d sequences go back to the queue", self._prefix, num_running)
        return self.request_queue.give_back(self.scheduler)

    # ---- events ----

    def handle_rank(self, event: Received | Disconnected) -> list[SequenceEvent]:
        """Handles a message or a connection's end. Raises what `Members` does."""
        if isinstance(event, Disconnected):
            return self._handle_death(event)
        return self._handle_event(self.members.handle_message(event.rank, event.arrived_ns, event.message))

    def tick(self) -> list[SequenceEvent]:
        """Checks what no message reports: silent ranks, overdue steps."""
        now_ns = self._clock()
        if self.members.head_paused(now_ns):
            self.steps.head_paused(now_ns)
        events = self._handle_event(self.members.tick(now_ns))
        if (stuck := self.steps.stuck(now_ns)) is not None:
            step_id, stage = stuck
            for tensor in self._ranks.owing(step_id, stage):
                self._control.drop(self.members.ranks[stage * self.members.grid.tensor + tensor], LossCause.STUCK)
        return events

    def refill(self, woken_ns: int) -> None:
        """Sends steps while slots are free and sequences ready. woken_ns: the turn's begin."""
        scheduler = self.scheduler
        if scheduler is None or not self.members.formed:
            return
        if cancelled := scheduler.slots.take_cancelled():
            # A stage that has not begun one of these skips it.
            self._control.send(self.members.ranks, wire.Cancel(cancelled))
        while (plan := self.request_queue.schedule(scheduler, self._now_s())) is not None:
            self._send(plan, scheduler, woken_ns)
        self._account_for_result()

    def _send(self, plan: StepPlan, scheduler: Scheduler, woken_ns: int) -> None:
        self._control.send(self.members.ranks, wire.Plan(plan))
        step = self.steps.sent(plan, woken_ns, self._clock(), scheduler.slots.num_slots)
        self._account_for_result()
        self._account.dispatched(step)
        self._overheads.dispatched(step)
        for observer in self._observers:
            observer.on_step_sent(self.number, step)

    def report_load(self) -> None:
        """Also while the pipeline is lost."""
        if self.scheduler is not None:
            for observer in self._observers:
                num_waiting = self.request_queue.num_waiting
                observer.on_load(self.number, self.scheduler, self.steps.num_in_flight, num_waiting)

    def _handle_event(self, event: MemberEvent | None) -> list[SequenceEvent]:
        match event:
            case StepResult():
                return self._handle_result(event)
            case wire.Ready():
                self._handle_formed()
            case EpochLost(rank):
                self.lose_epoch()
                return [] if rank is None else self._blame_requests(rank, "error")
        return []

    def _handle_death(self, of: Disconnected) -> list[SequenceEvent]:
        self._handle_event(self.members.handle_disconnect(of.rank, of.cause, self._clock()))
        if not self.members.epoch:
            return []
        log.warning("%s died (%s)", self.members.grid.name(of.rank), of.cause)
        for observer in self._observers:
            observer.on_stage_died(self.number, self.members[of.rank].stage, of.cause)
        return [] if of.cause == LossCause.RESTART else self._blame_requests(of.rank, of.cause)

    def _handle_result(self, of_rank: StepResult) -> list[SequenceEvent]:
        result = self._ranks.add_result(of_rank)
        if result is None:
            return []
        self._account_for_result()
        step = self.steps.reported(result, self._clock())
        if step is None or self.scheduler is None:
            return []
        self._unaccounted = result, step
        events: list[SequenceEvent] = []
        if result.stage == self.steps.num_stages - 1:
            events = self.request_queue.commit(self.scheduler, result, self._now_s())
            self._fruitless_losses = 0 if events else self._fruitless_losses
        if self.scheduler.config.microbatches is None:
            self.scheduler.slots.resize(self._slot_count.observe(result, step.fills_slots))
        return events

    def _account_for_result(self) -> None:
        if self._unaccounted is None:
            return
        (result, step), self._unaccounted = self._unaccounted, None
        self._account.reported(step, result.stage)
        self._overheads.reported(step, result.stage)
        seconds = (result.stamps.ended - result.stamps.begun) / 1e9
        self._costs[result.stage].observe(StepSize.from_plan(step.plan), seconds)
        for observer in self._observers:
            observer.on_step_reported(self.number, step, result.stage)

    def _note_settled(self, settled: Settled) -> None:
        for observer in self._observers:
            observer.on_span_settled(self.number, settled)

    def _handle_formed(self) -> None:
        epoch = self.members.epoch
        log.info("%sepoch %d formed", self._prefix, epoch)
        self._account.formed(self._clock())
        self.scheduler = self.scheduler or self._new_scheduler()
        self.scheduler.open(epoch)

    def _new_scheduler(self) -> Scheduler:
        decision = self.members.decision
        assert decision is not None
        config = replace(decision.scheduling, replica=self.number)
        loaded = [member.loaded for member in self.members.all if member.loaded is not None]
        why_not = next((of_rank.why_not for of_rank in loaded if of_rank.why_not), None)
        if why_not and config.speculate != 0:
            # Without batch-invariance a draft token beside a row could change its token.
            log.warning("%snothing is drafted: %s", self._prefix, why_not)
            config = replace(config, speculate=0)
        blocks = BlockManager(self.members.num_blocks, config.block_size)
        scheduler = Scheduler(config, blocks, self._costs)
        self.request_queue.add_scheduler(scheduler)
        return scheduler

    def lose_epoch(self) -> None:
        """Steps in flight will not return. Requests wait for another replica or epoch."""
        self._account_for_result()
        self.steps.lost()
        self._ranks.lost()
        self._account.stage_lost(self._clock())
        self._in_flight = self.give_back()

    def _blame_requests(self, rank: int, failure: str) -> list[SequenceEvent]:
        """Records which requests were in flight, once the failed rank is known. failure: in one word. Raises
        StagesLost for a stage that dies of every request."""
        if not self._in_flight or self.members.head_paused(self._clock()):  # a silent head ends stages too
            return []
        in_flight, self._in_flight = self._in_flight, frozenset()
        self._fruitless_losses += 1
        if self._fruitless_losses == _MAX_FRUITLESS_LOSSES:
            problem = f"no request got a token between {_MAX_FRUITLESS_LOSSES} losses in a row"
            raise StagesLost(f"{problem}; the last one: {self.members.grid.name(rank)}: {failure}")
        # The same in all replicas: the ranks that compute one part of the model.
        place = self.members.grid.place(rank)
        return self.request_queue.record_loss(in_flight, {(place.stage, place.tensor, failure)})

    # ---- state ----

    def busy_s(self) -> tuple[float, ...]:
        """Settled seconds of computation of every stage."""
        self._account_for_result()
        return tuple(sum(times.busy_ns.values()) / 1e9 for times in self._account.settled())

    def read(self) -> ReplicaReading:
        """The pipeline now. Raises Draining before the first epoch."""
        self._account_for_result()
        scheduler = self.scheduler
        decision = self.members.decision
        now_ns = self._clock()
        if scheduler is None or decision is None:
            raise Draining("the server is not serving")
        each, costs = self.members.grid.tensor, self._costs
        return ReplicaReading(
            replica=self.number,
            serves=self.serves,
            epoch=self.members.epoch,
            microbatches=scheduler.slots.num_slots,
            running=scheduler.num_running,
            kv_usage=scheduler.kv_usage,
            num_waiting=self.request_queue.num_waiting,
            num_blocks=self.members.num_blocks,
            decision=decision,
            overheads=self._overheads.times,
            times=self._account.snapshot(now_ns),
            steps=tuple(stage.num_observed for stage in costs),
            costs=tuple(stage.coefficients for stage in costs),
            ranks=tuple(self.members.all[stage * each : (stage + 1) * each] for stage in range(len(costs))),
            gathered_ns=tuple(map(tuple, self._ranks.gathered_ns)),
            now_ns=now_ns,
        )

    def _now_s(self) -> float:
        return self._clock() / 1e9
