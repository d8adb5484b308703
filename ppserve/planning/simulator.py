"""Simulates a pipeline: the real scheduler and the real ledger, with predicted times instead of stages.

What steps take is read from a running server (`/costs.json`), and divided into costs of a layer and the LM head.
Callers have one request at a time, all of one size. Stages run steps in order, in the predicted time, so all
times of a step are known when it is sent. The head is one thread: it receives things in the order of time.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ppserve.core.architecture import MAX_LAYERS, Architecture, Split, StageLayout, stage_layouts, sublayer_params
from ppserve.core.cost_model import Coefficients, StageCost, StepSize
from ppserve.core.figures import percentile, table
from ppserve.core.ledger.account import StageTimes, TimeAccount
from ppserve.core.ledger.causes import CAUSES
from ppserve.core.ledger.steps import OverheadTimes, Steps
from ppserve.core.plan import Drawn, StepPlan, StepResult, StepStamps
from ppserve.core.request import Request, StopConditions
from ppserve.core.scheduling.block_manager import BlockManager
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.core.scheduling.request_queue import RequestQueue
from ppserve.core.scheduling.scheduler import Scheduler
from ppserve.core.scheduling.sequence import SequenceEvent
from ppserve.core.scheduling.slots import SlotCount
from ppserve.errors import ConfigError

_NS = 1_000_000_000
_ENOUGH_STEPS = 50  # fewer do not tell what a row costs, and what a key
_Seconds = Annotated[float, msgspec.Meta(ge=0)]
_Overheads = msgspec.defstruct(
    "_Overheads", [(each.name, _Seconds, 0.0) for each in fields(OverheadTimes)], forbid_unknown_fields=True
)


@dataclass(frozen=True, slots=True)
class CostSheet:
    """What steps cost on one rank of the server that was measured."""

    layer: Coefficients
    head: Coefficients
    """Final norm, LM head and sampling."""
    overheads: OverheadTimes
    max_chunk: int
    """Most prompt tokens in a step of the server."""
    num_tensor: int = 1
    """Tensor ranks of each stage; the costs include their waiting for each other."""

    def stage(self, arch: Architecture, layout: StageLayout) -> Coefficients:
        """The cost of a stage on such ranks. Raises ConfigError for tensor ranks without costs."""
        if self.num_tensor not in (1, layout.num_tensor):
            problem = f"it is of a server with {self.num_tensor} tensor ranks in each stage"
            raise ConfigError("--costs", f"{problem}, and says nothing of {layout.num_tensor}")
        head = self.head if layout.is_last else Coefficients()
        layer_weights = layout.layer_weights(arch)
        measured = replace(layout, tensor=0, num_tensor=self.num_tensor)
        share = sublayer_params(arch, layout) / sublayer_params(arch, measured)
        return Coefficients(
            share * (self.layer.step * layer_weights + head.step),
            share * (self.layer.row * layer_weights + head.row),
            share * self.layer.key * len(layout.attentions),
            share * head.sample,
        )


class _StageCosts(msgspec.Struct):
    layers: Annotated[float, msgspec.Meta(ge=1, le=MAX_LAYERS, multiple_of=0.5)]
    steps: int
    step_s: _Seconds
    row_s: _Seconds
    key_s: _Seconds
    sample_s: _Seconds


class _CostFile(msgspec.Struct):
    stages: Annotated[list[_StageCosts], msgspec.Meta(min_length=1)]
    tensor: Annotated[int, msgspec.Meta(ge=1)]
    max_chunk: Annotated[int, msgspec.Meta(ge=1)]
    overheads: _Overheads  # type: ignore[valid-type]


def read_costs(path: Path, arch: Architecture) -> CostSheet:
    """Read the /costs.json of a server with this model. Raises ConfigError."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_CostFile)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("--costs", f"{path} is no cost sheet: {error}") from None
    stages = [Coefficients(each.step_s, each.row_s, each.key_s, each.sample_s) for each in file.stages]
    if any(each.steps < _ENOUGH_STEPS for each in file.stages) or Coefficients() in stages:
        raise ConfigError("--costs", f"{path}: its server had computed hardly a step: give it a load first")
    layouts = stage_layouts(Split(tuple(round(2 * each.layers) for each in file.stages)))
    overheads = OverheadTimes(**msgspec.structs.asdict(file.overheads))
    return CostSheet(*_divided(stages, layouts, arch), overheads, file.max_chunk, file.tensor)


def _divided(
    stages: list[Coefficients], layouts: tuple[StageLayout, ...], arch: Architecture
) -> tuple[Coefficients, Coefficients]:
    """A layer and the head: what the last stage takes beyond its layers; of a lone one, its sampled rows."""
    others = list(zip(stages, layouts, strict=True))[: max(1, len(stages) - 1)]
    num_layers = sum(layout.layer_weights(arch) for _, layout in others)
    num_attentions = sum(len(layout.attentions) for _, layout in others)
    # In decode every row is sampled, so the fit cannot separate the two.
    rows_s = sum(cost.row for cost, _ in others) + sum(cost.sample for cost in stages[:-1])
    layer = Coefficients(
        step=sum(cost.step for cost, _ in others) / num_layers,
        row=rows_s / num_layers,
        key=sum(cost.key for cost, _ in others) / num_attentions,
    )
    last = stages[-1]
    own = layouts[-1].layer_weights(arch)
    step_s = last.step - layer.step * own
    sample_s = last.sample + last.row - layer.row * own
    return layer, Coefficients(step=max(0.0, step_s), sample=max(0.0, sample_s))


@dataclass(slots=True)
class Outcome:
    """The times of a simulation."""

    wall_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)  # all gaps between the tokens of a request
    e2e_s: list[float] = field(default_factory=list)  # from each request's arrival to its end
    stages: tuple[StageTimes, ...] = ()

    @property
    def figures(self) -> dict[str, Any]:
        """Seconds, rates per second, and each stage's shares of the time with work."""
        latencies = {"ttft_s": self.ttft_s, "itl_s": self.itl_s, "e2e_s": self.e2e_s}
        return {
            "requests": len(self.e2e_s),
            "duration_s": self.wall_s,
            "requests_per_s": len(self.e2e_s) / self.wall_s,
            "output_tokens_per_s": (len(self.ttft_s) + len(self.itl_s)) / self.wall_s,
            **{f"{name}_p{p}": percentile(values, p) for name, values in latencies.items() for p in (50, 99)},
            "stages": [
                {"busy": times.busy_share, **{cause: times.bubble_share(cause) for cause in CAUSES}}
                for times in self.stages
            ],
        }


class Simulator:
    """A replica without stages. Its scheduler learns the costs of steps from their results."""

    def __init__(
        self, stages: Sequence[Coefficients], overheads: OverheadTimes, config: SchedulerConfig, num_blocks: int
    ) -> None:
        self._stages = stages
        self._overheads = overheads
        self._steps = Steps(len(stages))
        self._costs = [StageCost() for _ in stages]
        self._scheduler = Scheduler(config, BlockManager(num_blocks, config.block_size), self._costs)
        self._request_queue = RequestQueue()
        self._request_queue.add_scheduler(self._scheduler)
        self._slots = None if config.microbatches else SlotCount(self._costs)
        self._account = TimeAccount(self._steps, 0)
        self._free_s = [0.0] * len(stages)
        """When each stage is done with all steps that were sent."""
        self._inbox: list[tuple[float, int, StepResult | None]] = []
        """What the head will receive, as a heap: when, its number, and a result or None, a request."""
        self._numbers = count()
        self._times_s: dict[str, list[float]] = {}
        """When each request that has not ended arrived, and when its tokens came."""
        self._outcome = Outcome()

    def run(self, num_requests: int, prompt_tokens: int, new_tokens: int, callers: int) -> Outcome:
        """A caller sends its next request when it has the answer to the last."""
        stop = StopConditions(new_tokens, ignore_eos=True)
        requests = (Request(str(number), (0,) * prompt_tokens, stop) for number in range(num_requests))
        head_free_s = 0.0
        self._account.demand_began(0)
        for _ in range(callers):
            self._receive(0.0, None)
        while self._inbox:
            at_s, _, result = heapq.heappop(self._inbox)
            now_s = max(at_s, head_free_s)
            if result is not None:
                self._commit(result, now_s)
            elif (request := next(requests, None)) is not None:
                self._times_s[request.id] = [at_s]
                self._request_queue.submit(request, now_s)
            head_free_s = self._fill_pipeline(now_s)
        self._account.demand_ended(round(head_free_s * _NS))
        self._outcome.wall_s = head_free_s
        self._outcome.stages = self._account.settled()
        return self._outcome

    def _receive(self, at_s: float, result: StepResult | None) -> None:
        heapq.heappush(self._inbox, (at_s, next(self._numbers), result))

    def _fill_pipeline(self, now_s: float) -> float:
        """Sends steps until the pipeline is full; returns when the head is done with that."""
        woken_ns = round(now_s * _NS)
        self._request_queue.admit(now_s)
        while (plan := self._request_queue.schedule(self._scheduler, now_s)) is not None:
            now_s += self._overheads.head_s
            step = self._steps.sent(plan, woken_ns, round(now_s * _NS), self._scheduler.slots.num_slots)
            self._account.dispatched(step)
            self._send(plan, now_s)
        return now_s

    def _send(self, plan: StepPlan, now_s: float) -> None:
        over = self._overheads
        last = len(self._stages) - 1
        size = StepSize.from_plan(plan)
        planned_s = arrives_s = now_s + over.control_s
        for stage, cost in enumerate(self._stages):
            awaited_s = max(self._free_s[stage], planned_s) + over.prepare_s
            begun_s = max(awaited_s, arrives_s)
            ended_s = begun_s + cost.seconds(size)
            sent_s = ended_s + (over.sending_s if stage < last else 0.0)
            self._free_s[stage] = sent_s
            arrives_s = sent_s + over.transfer_s
            times_s = (planned_s, awaited_s, begun_s, begun_s, ended_s, sent_s)
            stamps = StepStamps(*(round(at_s * _NS) for at_s in times_s))
            drawing = plan.slices if stage == last else ()
            drawn = tuple(Drawn(piece.sequence_id, 0) for piece in drawing for _ in piece.draws)
            result = StepResult(plan.epoch, plan.step_id, stage, stamps, drawn=drawn)
            self._receive(sent_s + over.return_s, result)

    def _commit(self, result: StepResult, now_s: float) -> None:
        step = self._steps.reported(result, round(now_s * _NS))
        assert step is not None
        self._account.reported(step, result.stage)
        self._costs[result.stage].observe(StepSize.from_plan(step.plan), result.computed_ns / _NS)
        if self._slots is not None:
            self._scheduler.slots.resize(self._slots.observe(result, step.fills_slots))
        if result.stage == len(self._stages) - 1:
            for event in self._request_queue.commit(self._scheduler, result, now_s):
                self._note(event, now_s)

    def _note(self, event: SequenceEvent, now_s: float) -> None:
        if event.token_id is not None:
            self._times_s[event.request_id].append(now_s)
        if event.is_terminal:
            arrived_s, *token_s = self._times_s.pop(event.request_id)
            self._outcome.ttft_s.append(token_s[0] - arrived_s)
            self._outcome.itl_s += [after - before for before, after in pairwise(token_s)]
            self._outcome.e2e_s.append(now_s - arrived_s)
            self._receive(now_s, None)


def render_outcome(figures: dict[str, Any]) -> str:
    """figures: those of an outcome."""
    rows = [(name, f"{value:.4g}") for name, value in figures.items() if name != "stages"]
    kinds = ("busy", *CAUSES)
    shares = [(str(at), *(f"{stage[kind]:.0%}" for kind in kinds)) for at, stage in enumerate(figures["stages"])]
    return "\n".join([*table(*rows, left=1), "", *table(("stage", *kinds), *shares)])
