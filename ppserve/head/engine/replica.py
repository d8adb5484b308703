"""One pipeline: its members, its scheduler, its steps and its ledger.

The replica sends the scheduler's plans, and passes results to the book of steps, the ledger, the cost model and
the scheduler. It does not know streams. All of it runs in the engine's thread.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from ppserve import wire
from ppserve.core.architecture import Split
from ppserve.core.ledger.account import Settled, StageTimes, TimeAccount
from ppserve.core.ledger.steps import Step, Steps
from ppserve.core.plan import RankResult, StepPlan, StepResult
from ppserve.core.scheduling.block_manager import BlockManager
from ppserve.core.scheduling.request_queue import RequestQueue
from ppserve.core.scheduling.scheduler import Scheduler
from ppserve.core.scheduling.sequence import SequenceEvent
from ppserve.errors import Draining, StagesLost
from ppserve.head.engine.control import ControlPlane, Disconnected, LossCause, Received
from ppserve.head.engine.member import Decision, EpochLost, Member, MemberEvent
from ppserve.head.engine.members import Members
from ppserve.head.engine.step_books import StepBooks

log = logging.getLogger("ppserve.engine")

# So many losses in a row, without a token between them, end the replica. A request that kills stages causes four
# at most (`PoisonIsolation`).
_MAX_FRUITLESS_LOSSES = 64


@dataclass(frozen=True, slots=True)
class ReplicaReading:
    """A replica at one moment. Tuples are by stage, and by a stage's ranks."""

    replica: int
    serves: bool  # whether all its stages are there
    epoch: int
    microbatches: int
    running: int  # sequences
    kv_usage: float  # 0 to 1
    num_waiting: int  # requests that no replica computes
    num_blocks: int
    decision: Decision  # the shape of the latest epoch that has formed, to which the figures below belong
    times: tuple[StageTimes, ...]  # since the start, also of stages that the present shape does not use
    steps: tuple[int, ...]  # how many the same stages have computed since the start
    times_in_shape: tuple[StageTimes, ...]  # since the layers were divided as they are
    steps_in_shape: tuple[int, ...]
    ranks: tuple[tuple[Member, ...], ...]
    gathered_ns: tuple[tuple[int, ...], ...]  # how long each rank has waited for the others
    now_ns: int  # on the engine's clock


class StepObserver:
    """Gets the events of replicas, in the engine's thread but for `on_mask`. This one does nothing with them."""

    def on_step_sent(self, replica: int, step: Step, scheduler: Scheduler) -> None:
        """Is called when a step was sent to all stages. scheduler: knows the requests of the step's sequences."""

    def on_step_reported(self, replica: int, step: Step, stage: int) -> None:
        """Is called when a stage's result of a step is in the book."""

    def on_span_settled(self, replica: int, settled: Settled) -> None:
        """Is called when the ledger knows what an interval of a stage's time was spent on."""

    def on_stage_died(self, replica: int, stage: int, cause: LossCause) -> None:
        """Is called when one of a stage's processes has died."""

    def on_mask(self, seconds: float) -> None:
        """Is called when a token filter took so long to make a mask, in the thread that made it."""

    def on_load(self, replica: int, scheduler: Scheduler, in_flight: int, num_waiting: int) -> None:
        """Is called when a turn has ended. in_flight: how many steps are. num_waiting: how many requests no
        replica computes."""


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
        """clock: monotonic, in nanoseconds. request_queue: the one of all replicas."""
        self.number = members.replica
        self.members = members
        self.request_queue = request_queue
        self.scheduler: Scheduler | None = None  # None until the first epoch has formed
        self._observers = observers
        self._shape: Decision | None = None  # of the latest epoch that has formed
        self._books = StepBooks(members.grid.pipeline, members.grid.tensor)
        self._account = TimeAccount(self.steps, clock(), self._note_settled)
        self._loaded: tuple[wire.Loaded | None, ...] = ()  # of each rank, when that epoch formed
        # The times and steps of every stage when the present shape began.
        self._times_before = self._account.settled()
        self._steps_before = (0,) * members.grid.pipeline
        # Requests in flight at a loss, until it is known which rank failed.
        self._in_flight: frozenset[str] = frozenset()
        self._fruitless_losses = 0  # in a row
        # The latest result, until it is accounted for, which is done after the next plan is sent.
        self._unaccounted: tuple[StepResult, Step] | None = None
        self._prefix = f"replica {self.number}: " if members.grid.data > 1 else ""
        self._control = control
        self._clock = clock

    @property
    def steps(self) -> Steps:
        return self._books.steps

    # ---- requests ----

    @property
    def serves(self) -> bool:
        """Whether the replica has formed, and takes requests."""
        return self.members.formed and self.scheduler is not None and self.scheduler.is_open

    def note_demand(self, exists: bool) -> None:
        """Note whether the server has work. If it has, stages that wait have bubbles; if not, they are idle."""
        if exists:
            self._account.demand_began(self._clock())
        else:
            self._account_for_result()
            self._account.demand_ended(self._clock())

    def give_back(self) -> frozenset[str]:
        """Let all requests wait for the next epoch. Return the ids of those in flight."""
        if self.scheduler is None or not self.scheduler.is_open:
            return frozenset()
        if num_running := self.scheduler.num_running:
            log.info("%s%d sequences go back to the queue", self._prefix, num_running)
        return self.request_queue.give_back(self.scheduler)

    # ---- events ----

    def handle_rank(self, event: Received | Disconnected) -> list[SequenceEvent]:
        """Handle a message or a connection's end. Raises what `Members` raises."""
        if isinstance(event, Disconnected):
            return self._handle_death(event)
        return self._handle_event(self.members.handle_message(event.rank, event.arrived_ns, event.message))

    def tick(self) -> list[SequenceEvent]:
        """Check for what no message reports: silent ranks and overdue steps."""
        now_ns = self._clock()
        if self.members.head_paused(now_ns):
            self.steps.head_paused(now_ns)
        events = self._handle_event(self.members.tick(now_ns))
        for place in self._books.stuck(now_ns):
            self._control.drop(self.members.ranks[place], LossCause.STUCK)
        return events

    def reshape(self, split: Split, formed: Future[int]) -> None:
        """Divide the layers anew. Requests wait for the next epoch. See `Members.reshape`."""
        self._handle_event(self.members.reshape(split, formed, self._clock()))
        self._in_flight = frozenset()  # they are not to blame for a rank that dies while it loads

    def take_masks(self) -> list[SequenceEvent]:
        """Get the masks of the next steps, as far as they are there. Requests in whose answers no token may follow
        are ended."""
        return [] if self.scheduler is None else self.request_queue.take_masks(self.scheduler)

    def refill(self, woken_ns: int) -> None:
        """Send steps as long as slots are free and sequences are ready. woken_ns: when the turn began."""
        scheduler = self.scheduler
        if scheduler is None or not self.members.formed:
            return
        if cancelled := scheduler.ahead.take_cancelled():
            # A stage that has not begun one of these skips it.
            self._control.send(self.members.ranks_in_use, wire.Cancel(cancelled))
        if (masks := scheduler.ahead.take_masks()) is not None:
            self._control.send(self.members.ranks_in_use, wire.Masks(masks))
        while (plan := self.request_queue.schedule(scheduler, self._now_s())) is not None:
            self._send(plan, scheduler, woken_ns)
        self._account_for_result()

    def _send(self, plan: StepPlan, scheduler: Scheduler, woken_ns: int) -> None:
        self._control.send(self.members.ranks_in_use, wire.Plan(plan))
        step = self._books.send(plan, woken_ns, self._clock(), scheduler.slots.num_slots)
        self._account_for_result()
        self._account.dispatched(step)
        for observer in self._observers:
            observer.on_step_sent(self.number, step, scheduler)

    def report_load(self) -> None:
        """Tell the observers that a turn has ended, also while the pipeline is lost."""
        if self.scheduler is not None:
            for observer in self._observers:
                num_waiting = self.request_queue.num_waiting
                observer.on_load(self.number, self.scheduler, self.steps.num_in_flight, num_waiting)

    def _handle_event(self, event: MemberEvent | None) -> list[SequenceEvent]:
        match event:
            case RankResult():
                return self._handle_result(event)
            case wire.Ready():
                return self._handle_formed()
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
        if of.cause == LossCause.RESTART:
            self._in_flight = frozenset()  # they are not to blame for what a restart brings with it, either
        return self._blame_requests(of.rank, of.cause) if self.members.uses(of.rank) else []

    def _handle_result(self, of_rank: RankResult) -> list[SequenceEvent]:
        self._account_for_result()
        scheduler = self.scheduler
        reported = self._books.report(of_rank, self._clock())
        if reported is None or scheduler is None:
            return []
        self._unaccounted = reported
        result, step = reported
        if scheduler.config.microbatches is None:
            scheduler.slots.resize(self._books.choose_slots(result, step))
        if result.stage < self.steps.num_stages - 1:
            return []
        events = self.request_queue.commit(scheduler, result, self._now_s())
        if events:
            self._fruitless_losses = 0
        return events

    def _account_for_result(self) -> None:
        if self._unaccounted is None:
            return
        (result, step), self._unaccounted = self._unaccounted, None
        self._account.reported(step, result.stage)
        self._books.measure(result, step)
        for observer in self._observers:
            observer.on_step_reported(self.number, step, result.stage)

    def _note_settled(self, settled: Settled) -> None:
        for observer in self._observers:
            observer.on_span_settled(self.number, settled)

    def _handle_formed(self) -> list[SequenceEvent]:
        epoch = self.members.epoch
        log.info("%sepoch %d formed", self._prefix, epoch)
        self._loaded = tuple(member.loaded for member in self.members.all)
        if self.members.decision is not self._shape:
            self._begin_shape()
        assert self.scheduler is not None
        self._account.formed(self._clock())
        self.scheduler.open(epoch)
        # With other layers per stage there may be less memory for keys and values.
        return self.request_queue.end_impossible()

    def _begin_shape(self) -> None:
        """Begin new books: the epoch that has formed is the first with its layers per stage. No step is in
        flight."""
        now_ns = self._clock()
        self._shape = decision = self.members.decision
        assert decision is not None
        self._steps_before = self._count_steps()
        self._books = StepBooks(decision.num_stages, self.members.grid.tensor)
        self._account.reshape(self.steps, now_ns)
        self._times_before = self._account.snapshot(now_ns)
        before, self.scheduler = self.scheduler, self._new_scheduler(decision)
        if before is not None:
            self.request_queue.remove_scheduler(before)
            self.scheduler.continue_after(before)

    def _new_scheduler(self, decision: Decision) -> Scheduler:
        assert self.members.num_blocks is not None
        config = replace(decision.scheduling, replica=self.number)
        loaded = [member.loaded for member in self.members.in_use if member.loaded is not None]
        reason = next(filter(None, (of_rank.nondeterministic_reason for of_rank in loaded)), None)
        if reason is not None and config.speculate != 0:
            # Without batch-invariance, a draft token that is computed beside a row could change the row's token.
            log.warning("%snothing is drafted: %s", self._prefix, reason)
            config = replace(config, speculate=0)
        blocks = BlockManager(self.members.num_blocks, config.block_size)
        scheduler = Scheduler(config, blocks, self._books.costs)
        self.request_queue.add_scheduler(scheduler)
        return scheduler

    def lose_epoch(self) -> None:
        """Forget the steps in flight, which will not return. Requests wait for another replica or epoch."""
        self._account_for_result()
        self._books.lose()
        self._account.stage_lost(self._clock())
        self._in_flight = self.give_back()

    def _blame_requests(self, rank: int, failure: str) -> list[SequenceEvent]:
        """Record which requests were in flight, once the failed rank is known. failure: its kind, in one word.

        Raises StagesLost for a stage that dies of every request.
        """
        if not self._in_flight or self.members.head_paused(self._clock()):  # a silent head ends stages too
            return []
        in_flight, self._in_flight = self._in_flight, frozenset()
        self._fruitless_losses += 1
        if self._fruitless_losses == _MAX_FRUITLESS_LOSSES:
            problem = f"no request got a token between {_MAX_FRUITLESS_LOSSES} losses in a row"
            raise StagesLost(f"{problem}; the last one: {self.members.grid.name(rank)}: {failure}")
        # A failure is told by this place and not by its rank: in all replicas, ranks at one place compute the same
        # part of the model.
        place = self.members.grid.place(rank)
        return self.request_queue.record_loss(in_flight, {(place.stage, place.tensor, failure)})

    # ---- state ----

    def busy_s(self) -> tuple[float, ...]:
        """Return the settled seconds of computation of every stage, also of those that the present shape does not
        use."""
        self._account_for_result()
        return tuple(sum(times.busy_ns.values()) / 1e9 for times in self._account.settled())

    def read(self) -> ReplicaReading:
        """Read the pipeline's state now. Raise Draining before the first epoch."""
        self._account_for_result()
        scheduler = self.scheduler
        decision = self._shape
        now_ns = self._clock()
        if scheduler is None or decision is None:
            raise Draining("the server is not serving")
        times = self._account.snapshot(now_ns)
        in_use = range(self.steps.num_stages)
        # While ranks load other layers, the reading still has the layers that they had, and what they had loaded.
        pairs = zip(self.members.all, self._loaded, strict=True)
        ranks = tuple(replace(member, loaded=loaded) for member, loaded in pairs)
        each = self.members.grid.tensor
        return ReplicaReading(
            replica=self.number,
            serves=self.serves,
            epoch=self.members.epoch,
            microbatches=scheduler.slots.num_slots,
            running=scheduler.num_running,
            kv_usage=scheduler.kv_usage,
            num_waiting=self.request_queue.num_waiting,
            num_blocks=scheduler.num_blocks,
            decision=decision,
            times=times,
            steps=self._count_steps(),
            times_in_shape=tuple(times[stage].since(self._times_before[stage]) for stage in in_use),
            steps_in_shape=self._books.num_computed,
            ranks=tuple(ranks[stage * each : (stage + 1) * each] for stage in in_use),
            gathered_ns=self._books.gathered_ns,
            now_ns=now_ns,
        )

    def _count_steps(self) -> tuple[int, ...]:
        """Return how many steps each stage has computed since the start."""
        in_shape = self._books.num_computed
        unused = (0,) * (len(self._steps_before) - len(in_shape))
        return tuple(map(operator.add, self._steps_before, in_shape + unused))

    def _now_s(self) -> float:
        return self._clock() / 1e9
