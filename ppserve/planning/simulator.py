"""Simulates a pipeline: the real scheduler and the real ledger, with predicted times instead of stages.

Callers have one request at a time, all of one size. Stages run steps in the order in which these are sent and
always take the predicted time, so all times of a step are known when it is sent. What happens in the order of
time is what the head receives: requests and results. The head is one thread.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ppserve.core.cost_model import Coefficients, StepSize
from ppserve.core.figures import percentile, table
from ppserve.core.ledger.account import StageTimes, TimeAccount
from ppserve.core.ledger.causes import CAUSES
from ppserve.core.ledger.overheads import OverheadTimes
from ppserve.core.ledger.steps import Steps
from ppserve.core.plan import Drawn, StepPlan, StepResult, StepStamps
from ppserve.core.request import Request, StopConditions
from ppserve.core.scheduling.block_manager import BlockManager
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.core.scheduling.scheduler import Scheduler
from ppserve.core.scheduling.sequence import SequenceEvent
from ppserve.core.scheduling.slot_count import SlotCount

_NS = 1_000_000_000


@dataclass(slots=True)
class Outcome:
    """What happened in a simulation."""

    wall_s: float = 0.0
    new_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    """All gaps between the tokens of a request."""
    duration_s: list[float] = field(default_factory=list)
    """Of each request that has ended."""
    stages: tuple[StageTimes, ...] = ()

    @property
    def figures(self) -> dict[str, Any]:
        """Seconds, rates per second, and each stage's shares of the time with work."""
        latencies = {"ttft_s": self.ttft_s, "itl_s": self.itl_s, "e2e_s": self.duration_s}
        return {
            "requests": len(self.duration_s),
            "duration_s": self.wall_s,
            "requests_per_s": len(self.duration_s) / self.wall_s,
            "output_tokens_per_s": self.new_tokens / self.wall_s,
            **{f"{name}_p{p}": percentile(values, p) for name, values in latencies.items() for p in (50, 99)},
            "stages": [
                {"busy": times.busy_share, **{cause: times.bubble_share(cause) for cause in CAUSES}}
                for times in self.stages
            ],
        }


class StageCosts:
    """The costs of all stages, as the scheduler's cost model."""

    def __init__(self, stages: Sequence[Coefficients]) -> None:
        self._stages = stages

    def predict(self, size: StepSize) -> float:
        """Seconds on the slowest stage."""
        return max(self.predict_each(size))

    def predict_each(self, size: StepSize) -> tuple[float, ...]:
        """Seconds on every stage."""
        return tuple(stage.seconds(size) for stage in self._stages)

    def fixed_s(self, stage: int) -> float:
        """Seconds of a step on a stage that do not depend on its size."""
        return self._stages[stage].step


@dataclass(slots=True)
class _Running:
    """A request that has not ended, and when its latest token came."""

    arrived_s: float
    last_token_s: float | None = None


class Simulator:
    """A run of one replica."""

    def __init__(
        self, stages: Sequence[Coefficients], overheads: OverheadTimes, config: SchedulerConfig, num_blocks: int
    ) -> None:
        self._costs, self._overheads = StageCosts(stages), overheads
        self._steps = Steps(len(stages))
        blocks = BlockManager(num_blocks, config.block_size)
        self._scheduler = Scheduler(replace(config, speculate=0), blocks, self._steps, self._costs)
        self._slots = None if config.microbatches else SlotCount(len(stages), self._costs.fixed_s)
        self._account = TimeAccount(self._steps, 0)
        self._free_s = [0.0] * len(stages)
        """When each stage is done with all steps that were sent."""
        self._inbox: list[tuple[float, int, StepResult | None]] = []
        """What the head will receive, as a heap: when, its number, and a result; None is a request."""
        self._num_events = 0
        self._running: dict[str, _Running] = {}
        self._outcome = Outcome()

    def run(self, num_requests: int, prompt_tokens: int, new_tokens: int, callers: int) -> Outcome:
        """What comes of so many equal requests. A caller sends its next one when it has the answer to the last."""
        stop = StopConditions(new_tokens, ignore_eos=True)
        requests = [Request(str(i), (0,) * prompt_tokens, stop) for i in range(num_requests)]
        num_left, head_free_s = num_requests, 0.0
        self._account.demand_began(0)
        for _ in range(min(callers, num_requests)):
            self._receive(0.0, None)
        while self._inbox:
            at_s, _, result = heapq.heappop(self._inbox)
            now_s = max(at_s, head_free_s)
            if result is not None:
                for _ in range(self._commit(result, now_s)):
                    self._receive(now_s, None)
            elif num_left:
                num_left -= 1
                request = requests[num_left]
                self._running[request.id] = _Running(at_s)
                self._scheduler.request_queue.submit(request, now_s)
            head_free_s = self._fill_pipeline(now_s)
        self._account.demand_ended(round(head_free_s * _NS))
        self._outcome.wall_s, self._outcome.stages = head_free_s, self._account.settled()
        return self._outcome

    def _receive(self, at_s: float, result: StepResult | None) -> None:
        heapq.heappush(self._inbox, (at_s, self._num_events, result))
        self._num_events += 1

    def _fill_pipeline(self, now_s: float) -> float:
        """Sends steps until the pipeline is full; returns when the head is done with that."""
        woken_ns = round(now_s * _NS)
        while (plan := self._scheduler.schedule(now_s)) is not None:
            now_s += self._overheads.head_s
            step = self._steps.sent(plan, woken_ns, round(now_s * _NS), self._scheduler.microbatches)
            self._account.dispatched(step)
            self._send(plan, now_s)
        return now_s

    def _send(self, plan: StepPlan, now_s: float) -> None:
        """The step's way through the stages."""
        over, last = self._overheads, len(self._free_s) - 1
        planned_s = arrives_s = now_s + over.control_s
        for stage, seconds in enumerate(self._costs.predict_each(StepSize.of(plan))):
            awaited_s = max(self._free_s[stage], planned_s) + over.prepare_s
            begun_s = max(awaited_s, arrives_s)
            ended_s = begun_s + seconds
            sent_s = ended_s + (over.sending_s if stage < last else 0.0)
            self._free_s[stage], arrives_s = sent_s, sent_s + over.transfer_s
            times_s = (planned_s, awaited_s, begun_s, begun_s, ended_s, sent_s)
            stamps = StepStamps(*(round(at_s * _NS) for at_s in times_s))
            drawn = tuple(Drawn(piece.sequence_id, 0) for piece in plan.slices for _ in piece.draws)
            result = StepResult(plan.epoch, plan.step_id, stage, stamps, drawn=drawn if stage == last else ())
            self._receive(sent_s + over.return_s, result)

    def _commit(self, result: StepResult, now_s: float) -> int:
        """A stage's result; returns how many requests it has ended."""
        step = self._steps.reported(result, round(now_s * _NS))
        assert step is not None
        self._account.reported(step, result.stage)
        if self._slots is not None:
            self._scheduler.set_microbatches(self._slots.observe(result, step.fills_slots))
        if result.stage < len(self._free_s) - 1:
            return 0
        return sum(self._note(event, now_s) for event in self._scheduler.commit(result, now_s))

    def _note(self, event: SequenceEvent, now_s: float) -> bool:
        """What happened to a sequence; whether its request has ended."""
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
        return event.is_terminal


_FIGURES = (
    *(("requests/s", "requests_per_s", 1.0), ("output tokens/s", "output_tokens_per_s", 1.0)),
    *(
        (f"{name} p{p} (ms)", f"{key}_p{p}", 1e3)
        for name, key in (("TTFT", "ttft_s"), ("ITL", "itl_s"), ("E2E", "e2e_s"))
        for p in (50, 99)
    ),
)


def render_outcome(figures: dict[str, Any]) -> str:
    """As text. figures: those of an outcome."""
    lines = table(*((title, f"{figures[key] * scale:.4g}") for title, key, scale in _FIGURES), left=1)
    kinds = ("busy", *CAUSES)
    stages = enumerate(figures["stages"])
    shares = [(str(number), *(f"{stage[kind]:.0%}" for kind in kinds)) for number, stage in stages]
    return "\n".join([*lines, "", *table(("stage", *kinds), *shares)])
