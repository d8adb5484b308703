"""Simulates a pipeline: the real scheduler and the real ledger, with predicted times instead of stages.

Stages run steps in the order in which these are sent. Events are arrivals of requests, begins and ends of steps
on stages, and stages' results. When a step begins it is known whether a cancel has overtaken it; then the stage
skips it. The head is one thread: each event waits for the one before, and for a core. Its replicas run together.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial

from ppserve.core.cost_model import StepSize
from ppserve.core.ledger.account import StageTimes, TimeAccount
from ppserve.core.ledger.steps import Step, Steps
from ppserve.core.plan import Drawn, StepPlan, StepResult, StepStamps
from ppserve.core.request import Request, StopConditions
from ppserve.core.scheduling.block_manager import BlockManager
from ppserve.core.scheduling.composer import CostModel
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.core.scheduling.drafter import DraftToken
from ppserve.core.scheduling.scheduler import Scheduler
from ppserve.core.scheduling.sequence import SequenceEvent
from ppserve.core.scheduling.slot_count import SlotCount
from ppserve.planning.clock import Clock
from ppserve.planning.cores import Cores, Thread
from ppserve.planning.machine import Machine

_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """arrival_s: after the start. prompt_tokens, new_tokens: at least 1 each. acceptance: the share of draft
    tokens of its tokens that are right; None: the simulator's."""

    arrival_s: float
    prompt_tokens: int
    new_tokens: int
    acceptance: float | None = None


@dataclass(slots=True)
class Outcome:
    """What happened. ttft_s, duration_s: per request, in order of their ends. itl_s: all gaps between tokens."""

    wall_s: float = 0.0
    num_steps: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    duration_s: list[float] = field(default_factory=list)
    stages: tuple[StageTimes, ...] = ()

    @property
    def output_tokens_per_s(self) -> float:
        return self.new_tokens / self.wall_s

    @property
    def requests_per_s(self) -> float:
        return len(self.duration_s) / self.wall_s


@dataclass(slots=True)
class SimulatedHead:
    """Of all replicas that run together. cores: of its host, where callers are who compute `caller_s` for each
    token; None: it has a core of its own."""

    clock: Clock = field(default_factory=Clock)
    cores: Cores | None = None
    numbers: Iterator[int] = field(default_factory=itertools.count)
    _thread: Thread = field(default_factory=Thread)
    _callers: Thread = field(default_factory=Thread)
    _is_awake: bool = False
    _are_called: bool = False
    _untold_s: float = 0.0
    _inbox: deque[Callable[[float], float]] = field(default_factory=deque)

    def hear(self, handle: Callable[[float], float], now_s: float) -> None:
        """A message: to be handled when it is its turn, which takes as long as is returned."""
        self._inbox.append(handle)
        if not self._is_awake:
            self._is_awake = True
            self._compute(now_s, 0.0, self._handle)

    def tell(self, num_tokens: int, now_s: float) -> None:
        """So many reach its callers, who are one thread."""
        if self.cores is not None:
            self._untold_s += num_tokens * self.cores.of.caller_s
            if not self._are_called:
                self._call(now_s)

    def _call(self, now_s: float) -> None:
        seconds, self._untold_s = self._untold_s, 0.0
        self._are_called = seconds > 0.0
        if self.cores is not None and self._are_called:
            self.cores.take(now_s, seconds, self._callers, self._call)

    def _handle(self, now_s: float) -> None:
        self._is_awake = bool(self._inbox)
        if self._is_awake:
            self._compute(now_s, self._inbox.popleft()(now_s), self._handle)

    def _compute(self, now_s: float, seconds: float, then: Callable[[float], None]) -> None:
        if self.cores is None:
            self.clock.at(now_s + seconds, then)
        else:
            self.cores.take(now_s, seconds, self._thread, then)


@dataclass(slots=True)
class _Running:
    asked: SimulatedRequest
    arrived_s: float
    last_token_s: float | None = None


@dataclass(slots=True)
class _Passing:
    """A step on its way through the stages. planned_s: when these have its plan. stage, arrives_s: which of them
    is the next to have its hidden states, and when. cancelled_s: when the stages know that it need not be
    computed."""

    plan: StepPlan
    size: StepSize
    planned_s: float
    arrives_s: float
    stage: int = 0
    cancelled_s: float = math.inf


@dataclass(slots=True)
class _SimulatedStage:
    """queue: the steps of which it has the plan, in order. free_s: when it was done with the one before.
    awaited_s: since when it waits for hidden states of the queue's first; infinite: it has not prepared that.
    ranks: how many of its ranks are on each host whose cores are shared. threads: those that compute, or did.
    num_busy: how many of these, with several of one host as one, still do."""

    number: int
    ranks: Counter[Cores]
    queue: deque[_Passing] = field(default_factory=deque)
    free_s: float = 0.0
    awaited_s: float = math.inf
    threads: list[Thread] = field(default_factory=lambda: [Thread()])
    num_busy: int = 0


class _SimulatedDrafter:
    """Draft tokens the simulated token 0, as often as it is told to be right."""

    def __init__(self, rate: float, seed: int) -> None:
        self._rate, self._chance = rate, random.Random(seed)

    def draft_token(self, token_ids: Seq[int], draft_tokens: Seq[int]) -> DraftToken | None:
        return DraftToken(int(self._chance.random() >= self._rate), self._rate)


class Simulator:
    """One run of one replica. costs: the scheduler's predictions; None: it fills steps by tokens only. acceptance:
    the share of draft tokens that are right; 0: none are made. seed: of which they are. head: None: one of its
    own."""

    def __init__(
        self,
        machine: Machine,
        config: SchedulerConfig,
        costs: CostModel | None = None,
        acceptance: float = 0.0,
        seed: int = 0,
        head: SimulatedHead | None = None,
    ) -> None:
        self._machine = machine
        self._head = head or SimulatedHead()
        self._clock = self._head.clock
        self._steps = Steps(len(machine.stages))
        blocks = BlockManager(machine.num_blocks, config.block_size)
        config = replace(config, speculate=None if acceptance else 0)
        self._acceptance, self._seed = acceptance, seed
        self._guessers: dict[float, _SimulatedDrafter] = {}
        self._scheduler = Scheduler(config, blocks, self._steps, costs, new_drafter=self._guesser_of)
        self._account = TimeAccount(self._steps, 0)
        on = machine.on or ((),) * len(machine.stages)
        self._stages = [_SimulatedStage(number, Counter(cores)) for number, cores in enumerate(on)]
        self._passing: dict[int, _Passing] = {}
        self._ended_s = 0.0
        self._running: dict[str, _Running] = {}
        self._backlog: list[SimulatedRequest] = []
        self._outcome = Outcome()
        self._slots = None if config.microbatches else SlotCount(len(machine.stages), machine.fixed_s)

    def run(self, requests: Iterable[SimulatedRequest], concurrency: int | None = None) -> Outcome:
        """What comes of these requests, as for `ask`, and of all that was asked of others with the same head."""
        self.ask(requests, concurrency)
        self._clock.run()
        return self.end()

    def ask(self, requests: Iterable[SimulatedRequest], concurrency: int | None = None) -> None:
        """To be simulated: all requests, each at its arrival or, with `concurrency`, that many at any time."""
        if concurrency is None:
            for request in requests:
                self._reaches_head(request.arrival_s, request)
        else:
            self._backlog = list(requests)[::-1]
            for _ in range(min(concurrency, len(self._backlog))):
                self._reaches_head(0.0, self._backlog.pop())

    def end(self) -> Outcome:
        """When the clock has run."""
        self._account.demand_ended(round(self._ended_s * _NS))
        self._outcome.wall_s, self._outcome.stages = self._ended_s, self._account.settled()
        return self._outcome

    def _guesser_of(self, request: Request, _index: int) -> _SimulatedDrafter:
        own = self._running[request.id].asked.acceptance
        rate = self._acceptance if own is None else own
        return self._guessers.setdefault(rate, _SimulatedDrafter(rate, self._seed))

    def _reaches_head(self, at_s: float, what: SimulatedRequest | StepResult) -> None:
        self._clock.at(at_s, partial(self._head.hear, partial(self._handle, what, at_s)))

    def _handle(self, what: SimulatedRequest | StepResult, arrived_s: float, begun_s: float) -> float:
        """A turn of the engine: handles an event, then fills the pipeline. Returns how long it takes."""
        now_s, scheduler, num_tokens = begun_s, self._scheduler, 0
        if isinstance(what, StepResult):
            num_tokens = self._reported(what, now_s)
            now_s += num_tokens * self._machine.wires.token_s
        else:
            self._submit(what, now_s, arrived_s)
        while True:
            plan = scheduler.schedule(now_s)
            self._cancel_doomed(now_s + self._machine.wires.control_s)
            if plan is None:
                break
            now_s += self._machine.wires.head_s
            self._account.dispatched(self._sent(plan, begun_s, now_s))
            self._outcome.num_steps += 1
            planned_s = now_s + self._machine.wires.control_s
            step = self._passing[plan.step_id] = _Passing(plan, StepSize.of(plan), planned_s, planned_s)
            for stage in self._stages:
                stage.queue.append(step)
                if len(stage.queue) == 1:
                    self._await(stage)
        if isinstance(what, StepResult):
            now_s += self._machine.wires.report_s
        telling_s = num_tokens * self._machine.wires.telling_s
        now_s += telling_s
        self._ended_s = now_s
        if num_tokens:
            # It makes text of all tokens first, and computes beside its callers when it sends that.
            self._clock.at(now_s - telling_s / 2, partial(self._head.tell, num_tokens))
        if not (scheduler.request_queue.groups or scheduler.is_busy):
            self._account.demand_ended(round(now_s * _NS))
        return now_s - begun_s

    def _sent(self, plan: StepPlan, woken_s: float, sent_s: float) -> Step:
        return self._steps.sent(plan, round(woken_s * _NS), round(sent_s * _NS), self._scheduler.microbatches)

    def _cancel_doomed(self, known_s: float) -> None:
        """known_s: to the stages."""
        for step_id in self._scheduler.slots.take_cancelled():
            self._steps.doom(step_id)
            if (cancelled_steps := self._passing.get(step_id)) is not None:
                cancelled_steps.cancelled_s = known_s

    def _submit(self, asked: SimulatedRequest, now_s: float, arrived_s: float) -> None:
        name = str(next(self._head.numbers))
        stop = StopConditions(asked.new_tokens, ignore_eos=True)
        self._running[name] = _Running(asked, arrived_s)
        self._outcome.prompt_tokens += asked.prompt_tokens
        self._account.demand_began(round(now_s * _NS))
        self._scheduler.request_queue.submit(Request(name, (0,) * asked.prompt_tokens, stop), now_s)

    def _reported(self, result: StepResult, now_s: float) -> int:
        """How many tokens the result brought."""
        step = self._steps.reported(result, round(now_s * _NS))
        assert step is not None
        self._account.reported(step, result.stage)
        num_tokens = 0
        if result.stage == len(self._stages) - 1:
            for event in self._scheduler.commit(result, now_s):
                num_tokens += event.token_id is not None
                self._heard(event, now_s)
        if self._slots is not None:
            slots = self._slots.observe(result, step.fills_slots)
            self._scheduler.set_microbatches(slots)
        return num_tokens

    def _heard(self, event: SequenceEvent, now_s: float) -> None:
        running, outcome = self._running[event.request_id], self._outcome
        if event.token_id is not None:
            outcome.new_tokens += 1
            if running.last_token_s is None:
                outcome.ttft_s.append(now_s - running.arrived_s)
            else:
                outcome.itl_s.append(now_s - running.last_token_s)
            running.last_token_s = now_s
        if event.is_terminal:
            outcome.duration_s.append(now_s - running.arrived_s)
            del self._running[event.request_id]
            if self._backlog:
                self._reaches_head(now_s, self._backlog.pop())

    def _await(self, stage: _SimulatedStage) -> None:
        """The stage has nothing to do before the first step in its queue."""
        ready_s = max(stage.queue[0].planned_s, stage.free_s)
        if stage.ranks:
            self._clock.at(ready_s, partial(self._prepare, stage))
        else:
            self._prepared(stage, ready_s + self._machine.wires.prepare_s)

    def _prepare(self, stage: _SimulatedStage, now_s: float) -> None:
        self._compute(stage, now_s, self._machine.wires.prepare_s, False, partial(self._prepared, stage))

    def _compute(
        self, stage: _SimulatedStage, now_s: float, seconds: float, together: bool, then: Callable[[float], None]
    ) -> None:
        """Every rank of the stage does. together: with all its threads, which wait for each other."""
        ranks = stage.ranks
        done = partial(self._computed, stage, then)
        if not ranks:
            stage.threads, stage.num_busy = [Thread(began_s=now_s)], 1
            self._clock.at(now_s + seconds, done)
        elif [cores.of.threads * number for cores, number in ranks.items()] == [1]:
            stage.num_busy = 1
            next(iter(ranks)).take(now_s, seconds, stage.threads[0], done)
        else:
            stage.num_busy = len(ranks)
            each = [(cores, number * (cores.of.threads if together else 1)) for cores, number in ranks.items()]
            stage.threads = [cores.take_together(now_s, seconds, count, together, done) for cores, count in each]

    def _computed(self, stage: _SimulatedStage, then: Callable[[float], None], now_s: float) -> None:
        stage.num_busy -= 1
        if not stage.num_busy:
            then(now_s)

    def _prepared(self, stage: _SimulatedStage, awaited_s: float) -> None:
        stage.awaited_s = awaited_s
        self._receive(stage)

    def _receive(self, stage: _SimulatedStage) -> None:
        """Once it is prepared for them and they are there."""
        step = stage.queue[0]
        received_s = max(stage.awaited_s, step.arrives_s)
        if step.stage == stage.number and received_s < math.inf:
            self._clock.at(received_s, partial(self._begin, stage))

    def _begin(self, stage: _SimulatedStage, received_s: float) -> None:
        step, machine = stage.queue[0], self._machine
        is_last, is_skipped = stage is self._stages[-1], step.cancelled_s <= received_s
        size = step.size if is_last else replace(step.size, sampled=0)
        took_s = 0.0 if is_skipped else machine.delayed(machine.stages[stage.number].seconds(size))
        seconds = took_s + (0.0 if is_last else machine.wires.sending_s)
        self._compute(stage, received_s, seconds, True, partial(self._end, stage, is_skipped))

    def _end(self, stage: _SimulatedStage, is_skipped: bool, sent_s: float) -> None:
        step, wires, is_last = stage.queue.popleft(), self._machine.wires, stage is self._stages[-1]
        ended_s = sent_s if is_last else sent_s - wires.sending_s
        begun_s = max(thread.began_s for thread in stage.threads)
        times_s = (step.planned_s, stage.awaited_s, begun_s, begun_s, ended_s, sent_s)
        stamps = StepStamps(*(round(s * _NS) for s in times_s))
        drawn: tuple[Drawn, ...] = ()
        if is_last and not is_skipped:
            drawn = tuple(Drawn(piece.sequence_id, 0) for piece in step.plan.slices for _ in piece.draws)
        plan = step.plan
        result = StepResult(plan.epoch, plan.step_id, stage.number, stamps, drawn=drawn, skipped=is_skipped)
        self._reaches_head(sent_s + wires.return_s, result)
        stage.free_s, stage.awaited_s = sent_s, math.inf
        if is_last:
            del self._passing[plan.step_id]
        else:
            step.stage, step.arrives_s = stage.number + 1, sent_s + wires.transfer_s(step.size.rows)
            following = self._stages[step.stage]
            if following.queue[0] is step:
                self._receive(following)
        if stage.queue:
            self._await(stage)
