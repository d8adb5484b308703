"""Simulates a pipeline: the real scheduler and the real ledger, with predicted times instead of stages.

Stages run steps in the order in which these are sent. Events are arrivals of requests, begins of steps on stages,
and stages' results. When a step begins it is known whether a cancel has overtaken it; then the stage skips it. The
head is one thread: each event waits for the one before.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Protocol

from ppserve.core.cost_model import StepSize
from ppserve.core.ledger.account import StageTimes, TimeAccount
from ppserve.core.ledger.steps import Steps
from ppserve.core.plan import Drawn, StepPlan, StepResult, StepStamps
from ppserve.core.request import Request, StopConditions
from ppserve.core.scheduling.block_manager import BlockManager
from ppserve.core.scheduling.composer import CostModel
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.core.scheduling.drafter import Guess
from ppserve.core.scheduling.lane_count import LaneCount
from ppserve.core.scheduling.scheduler import Scheduler
from ppserve.core.scheduling.sequence import SequenceEvent

_NS = 1_000_000_000


class StageSpeed(Protocol):
    """How long a stage computes a step."""

    def seconds(self, size: StepSize) -> float: ...


@dataclass(frozen=True, slots=True)
class Device:
    """Of a stage: operations and bytes per second. launch_s: what the smallest step takes."""

    flops: float
    memory_bandwidth: float
    launch_s: float


@dataclass(frozen=True, slots=True)
class Roofline:
    """A stage by its sizes and its device: a step takes as long as reading the weights or, if longer, computing.

    head_bytes: of the LM head's matrix, 0 but on the last stage; read only in steps that sample.
    """

    device: Device
    weight_bytes: float
    flops_per_row: float
    kv_bytes_per_token: float
    head_bytes: float
    head_flops: float

    def seconds(self, size: StepSize) -> float:
        on = self.device
        layers_s = max(self.weight_bytes / on.memory_bandwidth, size.rows * self.flops_per_row / on.flops)
        keys_s = size.context * self.kv_bytes_per_token / on.memory_bandwidth
        head_s = max(self.head_bytes / on.memory_bandwidth, size.sampled * self.head_flops / on.flops)
        return on.launch_s + layers_s + keys_s + (head_s if size.sampled else 0.0)


@dataclass(frozen=True, slots=True)
class TensorRank:
    """One of the ranks that compute a stage together. own: its share of the work. gathers_s, row_s: what it waits
    for the other ranks' results, in a step and for each of its rows."""

    own: StageSpeed
    gathers_s: float
    row_s: float

    def seconds(self, size: StepSize) -> float:
        return self.own.seconds(size) + self.gathers_s + size.rows * self.row_s


@dataclass(frozen=True, slots=True)
class Wires:
    """Times around computing, in seconds; bandwidth in bytes per second.

    latency_s, bandwidth: of the link between two neighbours; bytes_per_row: hidden states of one token. control_s:
    from the head to a stage, for a plan; return_s: from a stage to the head, for a result. head_s, token_s: the
    head's work per step, and for each token that it sends to a caller. prepare_s: a stage's work per step before
    it receives hidden states; sending_s: after computing. gather_s: for tensor ranks to have each other's results,
    however small. spin_s: how long one that waits for them keeps its core before it sleeps.
    """

    latency_s: float = 50e-6
    bandwidth: float = 10e9
    bytes_per_row: int = 0
    control_s: float = 100e-6
    return_s: float = 100e-6
    head_s: float = 200e-6
    prepare_s: float = 100e-6
    sending_s: float = 0.0
    gather_s: float = 20e-6
    token_s: float = 0.0
    spin_s: float = 0.0

    def transfer_s(self, rows: int) -> float:
        return self.latency_s + rows * self.bytes_per_row / self.bandwidth


@dataclass(frozen=True, slots=True)
class Machine:
    """A pipeline to simulate. num_blocks: KV blocks of every stage.

    delayed: from the predicted to the simulated seconds of a step: adds what no cost model predicts, such as other
    programs on a core.
    """

    stages: tuple[StageSpeed, ...]
    wires: Wires
    num_blocks: int
    delayed: Callable[[float], float] = field(default=lambda seconds: seconds)

    def fixed_s(self, stage: int) -> float:
        """What the smallest step takes on a stage."""
        return self.stages[stage].seconds(StepSize(1, 1, int(stage == len(self.stages) - 1)))

    def predict(self, size: StepSize) -> float:
        """Seconds on the slowest stage: with `predict_each` the cost model that the scheduler gets."""
        return max(self.predict_each(size))

    def predict_each(self, size: StepSize) -> tuple[float, ...]:
        """Seconds on every stage."""
        return tuple(stage.seconds(size) for stage in self.stages)


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """arrival_s: after the start. prompt_tokens, new_tokens: at least 1 each. acceptance: the share of guesses of
    its tokens that are right; None: the simulator's."""

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
class _Running:
    asked: SimulatedRequest
    arrived_s: float
    last_token_s: float | None = None


@dataclass(slots=True)
class _Passing:
    """A step on its way through the stages. planned_s: when these have its plan. arrives_s: when the next stage
    has its hidden states. awaited_s: since when that stage has waited for them. cancelled_s: when the stages know
    that it need not be computed."""

    plan: StepPlan
    size: StepSize
    planned_s: float
    arrives_s: float
    awaited_s: float = 0.0
    cancelled_s: float = math.inf


class _Guesser:
    """Guesses the simulated token 0, as often as it is told to be right."""

    def __init__(self, rate: float, seed: int) -> None:
        self._rate, self._chance = rate, random.Random(seed)

    def guess(self, token_ids: Seq[int], guesses: Seq[int]) -> Guess | None:
        return Guess(int(self._chance.random() >= self._rate), self._rate)


class Simulator:
    """One run. costs: the scheduler's predictions; None: it fills steps by tokens only. acceptance: the share of
    guesses that are right; 0: none are made. seed: of which they are."""

    def __init__(
        self,
        machine: Machine,
        config: SchedulerConfig,
        costs: CostModel | None = None,
        acceptance: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._machine = machine
        self._steps = Steps(len(machine.stages))
        blocks = BlockManager(machine.num_blocks, config.block_size)
        config = replace(config, speculate=None if acceptance else 0)
        self._acceptance, self._seed = acceptance, seed
        self._guessers: dict[float, _Guesser] = {}
        self._scheduler = Scheduler(config, blocks, self._steps, costs, new_drafter=self._guesser_of)
        self._account = TimeAccount(self._steps, 0)
        self._free_s = [0.0] * len(machine.stages)
        self._queues: list[deque[_Passing]] = [deque() for _ in machine.stages]
        self._passing: dict[int, _Passing] = {}
        self._head_free_s = 0.0
        # A number is a stage, which begins the step that is first in its queue.
        self._events: list[tuple[float, int, SimulatedRequest | StepResult | int]] = []
        self._order = itertools.count()
        self._running: dict[str, _Running] = {}
        self._backlog: list[SimulatedRequest] = []
        self._outcome = Outcome()
        self._lanes = None if config.microbatches else LaneCount(len(machine.stages), machine.fixed_s)

    def run(self, requests: Iterable[SimulatedRequest], concurrency: int | None = None) -> Outcome:
        """Simulates all requests: each at its arrival or, with `concurrency`, that many at any time."""
        if concurrency is None:
            for request in requests:
                self._push(request.arrival_s, request)
        else:
            self._backlog = list(requests)[::-1]
            for _ in range(min(concurrency, len(self._backlog))):
                self._push(0.0, self._backlog.pop())
        while self._events:
            at_s, _, what = heapq.heappop(self._events)
            if isinstance(what, int):
                self._begin(what, at_s)
            else:
                self._turn(max(at_s, self._head_free_s), at_s, what)
        self._account.demand_ended(round(self._head_free_s * _NS))
        self._outcome.wall_s, self._outcome.stages = self._head_free_s, self._account.settled()
        return self._outcome

    def _guesser_of(self, request: Request, _index: int) -> _Guesser:
        own = self._running[request.id].asked.acceptance
        rate = self._acceptance if own is None else own
        return self._guessers.setdefault(rate, _Guesser(rate, self._seed))

    def _push(self, at_s: float, what: SimulatedRequest | StepResult | int) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), what))

    def _turn(self, now_s: float, happened_s: float, what: SimulatedRequest | StepResult) -> None:
        """A turn of the engine: handles an event, then fills the pipeline."""
        woken_ns = round(now_s * _NS)
        if isinstance(what, StepResult):
            now_s += self._reported(what, now_s) * self._machine.wires.token_s
        else:
            self._submit(what, now_s, happened_s)
        scheduler = self._scheduler
        while (plan := scheduler.schedule(now_s)) is not None:
            now_s += self._machine.wires.head_s
            self._account.dispatched(self._steps.sent(plan, woken_ns, round(now_s * _NS), scheduler.microbatches))
            self._outcome.num_steps += 1
            planned_s = now_s + self._machine.wires.control_s
            step = self._passing[plan.step_id] = _Passing(plan, StepSize.of(plan), planned_s, planned_s)
            self._reach(0, step)
        self._head_free_s = now_s
        if not (scheduler.intake.groups or scheduler.is_busy):
            self._account.demand_ended(round(now_s * _NS))

    def _submit(self, asked: SimulatedRequest, now_s: float, arrived_s: float) -> None:
        name = str(next(self._order))
        stop = StopConditions(asked.new_tokens, ignore_eos=True)
        self._running[name] = _Running(asked, arrived_s)
        self._outcome.prompt_tokens += asked.prompt_tokens
        self._account.demand_began(round(now_s * _NS))
        self._scheduler.intake.submit(Request(name, (0,) * asked.prompt_tokens, stop), now_s)

    def _reported(self, result: StepResult, now_s: float) -> int:
        """How many tokens the result brought."""
        step = self._steps.reported(result, round(now_s * _NS))
        assert step is not None
        self._account.reported(step, result.stage)
        num_tokens = 0
        if result.stage == len(self._free_s) - 1:
            for event in self._scheduler.commit(result, now_s):
                num_tokens += event.token_id is not None
                self._heard(event, now_s)
            for step_id in self._scheduler.lanes.take_doomed():
                self._steps.doom(step_id)
                if (doomed := self._passing.get(step_id)) is not None:
                    doomed.cancelled_s = now_s + self._machine.wires.control_s
        if self._lanes is not None:
            lanes = self._lanes.observe(step.plan, result, step.fills_lanes, num_tokens)
            self._scheduler.set_microbatches(lanes)
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
                self._push(now_s, self._backlog.pop())

    def _reach(self, stage: int, step: _Passing) -> None:
        """The step is the last in the stage's queue."""
        queue = self._queues[stage]
        queue.append(step)
        if len(queue) == 1:
            self._await(stage)

    def _await(self, stage: int) -> None:
        """The stage has nothing to do before the first step in its queue."""
        step = self._queues[stage][0]
        step.awaited_s = max(step.planned_s, self._free_s[stage]) + self._machine.wires.prepare_s
        self._push(max(step.awaited_s, step.arrives_s), stage)

    def _begin(self, stage: int, received_s: float) -> None:
        step, wires, is_last = self._queues[stage].popleft(), self._machine.wires, stage == len(self._free_s) - 1
        is_skipped = step.cancelled_s <= received_s
        size = step.size if is_last else replace(step.size, sampled=0)
        took_s = 0.0 if is_skipped else self._machine.delayed(self._machine.stages[stage].seconds(size))
        ended_s = received_s + took_s
        sent_s = ended_s if is_last else ended_s + wires.sending_s
        times_s = (step.planned_s, step.awaited_s, received_s, received_s, ended_s, sent_s)
        stamps = StepStamps(*(round(s * _NS) for s in times_s))
        drawn: tuple[Drawn, ...] = ()
        if is_last and not is_skipped:
            drawn = tuple(Drawn(piece.sequence_id, 0) for piece in step.plan.slices for _ in piece.draws)
        result = StepResult(step.plan.epoch, step.plan.step_id, stage, stamps, drawn=drawn, skipped=is_skipped)
        self._push(sent_s + wires.return_s, result)
        self._free_s[stage] = sent_s
        if is_last:
            del self._passing[step.plan.step_id]
        else:
            step.arrives_s = sent_s + wires.transfer_s(step.size.rows)
            self._reach(stage + 1, step)
        if self._queues[stage]:
            self._await(stage)
