"""What the simulator says of the loads of `speculation.py`, from the measured times of the same run.

Steps take what they took: on each stage by their number of rows, and each by a factor that one of them
had, so that the trial of draft tokens has as much chance in it as there. The head takes what it took by the
number of tokens that it handled. Rows that no step had cost as much more as the measured ones beside them.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from statistics import fmean, linear_regression, median

from verdicts import Ratio

from ppserve import Pipeline
from ppserve.core.cost_model import StepSize
from ppserve.core.ledger.overheads import Overheads
from ppserve.core.ledger.steps import Step
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.head.engine.open_request import OpenRequest
from ppserve.head.engine.output import TokenOutput
from ppserve.head.engine.watcher import Watcher
from ppserve.planning.machine import Machine, Wires
from ppserve.planning.simulator import SimulatedRequest, Simulator

# Simulated runs that differ by which draft tokens are right, and by which steps are late.
RUNS = 5


class Times(Watcher):
    """Of a pipeline's steps while it is watched. Steps that were skipped do not count."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._engine = pipeline._engine
        (self._replica,) = self._engine._fleet.replicas
        self._overheads = Overheads(self._replica.steps)
        num_stages = self._replica.steps.num_stages
        self._computed_s: list[defaultdict[int, list[float]]] = [defaultdict(list) for _ in range(num_stages)]
        self._head: list[tuple[int, float]] = []  # tokens that were handled since the last step, seconds
        self._num_tokens = self._last_ns = 0

    def watch(self) -> None:
        """From now on. No step is in flight."""
        self._replica._watcher = self._engine._watcher = self

    def output(self, opened: OpenRequest, output: TokenOutput, now_s: float) -> None:
        self._num_tokens += output.token_id is not None

    def dispatched(self, step: Step) -> None:
        self._overheads.dispatched(step)
        seconds = (step.sent_ns - max(step.woken_ns, self._last_ns)) / 1e9
        self._head.append((self._num_tokens, seconds))
        self._num_tokens, self._last_ns = 0, step.sent_ns

    def reported(self, step: Step, stage: int) -> None:
        self._overheads.reported(step, stage)
        result = step.result(stage)
        if result is not None and not result.skipped:
            self._computed_s[stage][step.plan.num_tokens].append(result.computed_ns / 1e9)

    def machine(self, seed: int) -> Machine:
        """As measured so far. seed: of which steps are late."""
        times = self._overheads.times
        by_rows = [{rows: _usual(many) for rows, many in stage.items()} for stage in self._computed_s]
        means = tuple(ByRows({rows: fmean(many) for rows, many in stage.items()}) for stage in by_rows)
        factors = [s / fmean(many) for stage in by_rows for many in stage.values() for s in many]
        chance = random.Random(seed)
        head_s, token_s = self._head_s()
        wires = Wires(
            latency_s=times.transfer_s, bandwidth=math.inf, control_s=times.control_s, return_s=times.return_s,
            head_s=head_s, token_s=token_s, prepare_s=times.prepare_s, sending_s=times.sending_s,
        )  # fmt: skip
        return Machine(means, wires, 10_000, delayed=lambda seconds: seconds * chance.choice(factors))

    def _head_s(self) -> tuple[float, float]:
        """For a step, and for each token that it brings a caller."""
        by_tokens: defaultdict[int, list[float]] = defaultdict(list)
        for num_tokens, seconds in self._head:
            by_tokens[num_tokens].append(seconds)
        usual = [(num_tokens, s) for num_tokens, many in by_tokens.items() for s in _usual(many)]
        if len({num_tokens for num_tokens, _ in usual if num_tokens}) < 2:
            return fmean(s for _, s in usual), 0.0
        line = linear_regression(*zip(*usual, strict=True))
        return line.intercept, max(0.0, line.slope)


def _usual(times_s: Seq[float]) -> list[float]:
    """Without the longest 2%, as in the ledger's overheads: one pause would outweigh hundreds of steps."""
    return sorted(times_s)[: len(times_s) - len(times_s) // 50]


@dataclass(frozen=True, slots=True)
class ByRows:
    """What a stage computes, by the rows of the step; others on straight lines through the measured ones."""

    measured_s: dict[int, float]

    def seconds(self, size: StepSize) -> float:
        known = sorted(self.measured_s)
        if size.rows in self.measured_s or len(known) == 1:
            return self.measured_s.get(size.rows, self.measured_s[known[0]])
        place = min(max(1, bisect_left(known, size.rows)), len(known) - 1)
        low, high = known[place - 1], known[place]
        row_s = (self.measured_s[high] - self.measured_s[low]) / (high - low)
        return max(self.measured_s[low] + row_s * (size.rows - low), 0.0)


def simulated(off: Times, auto: Times, rate: float, prompt: int, new: int, warm: int, answers: int) -> Ratio:
    """How many times as fast a lone caller is with draft tokens: `answers` of `new` tokens, after `warm` others.
    The median of the answers of each run, as in the measurement: by their sum, which unlucky ones make longer,
    answers whose draft tokens are right at a rate of 0.9 look slower."""
    asked = [SimulatedRequest(0.0, prompt, new)] * (warm + answers)

    def seconds(times: Times, rate: float, seed: int) -> list[float]:
        machine = times.machine(seed)
        simulator = Simulator(machine, SchedulerConfig(len(machine.stages)), machine, rate, seed)
        return simulator.run(asked, concurrency=1).duration_s[warm:]

    def usual(seed: int) -> float:
        pairs = zip(seconds(off, 0.0, seed), seconds(auto, rate, seed), strict=True)
        return median(before / drafted for before, drafted in pairs)

    return Ratio.of([usual(seed) for seed in range(RUNS)])
