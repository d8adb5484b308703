"""Passes the engine's callbacks on to the metrics, the trace and the live page."""

from __future__ import annotations

from collections.abc import Mapping

from ppserve.core.ledger.account import Settled
from ppserve.core.ledger.steps import Step
from ppserve.errors import RequestError
from ppserve.head.engine.open_request import OpenRequest
from ppserve.head.engine.output import TokenOutput
from ppserve.head.engine.watcher import Watcher
from ppserve.head.observe.live import RecentSpans
from ppserve.head.observe.metrics import Metrics
from ppserve.head.observe.trace import Trace


class Observer(Watcher):
    """See the module. trace: off until it is started."""

    def __init__(self, metrics: Metrics, trace: Trace, schedule: RecentSpans) -> None:
        self.metrics = metrics
        self.trace = trace
        self.schedule = schedule

    def dispatched(self, step: Step) -> None:
        self.metrics.dispatched(step)

    def reported(self, step: Step, stage: int) -> None:
        self.metrics.reported(step, stage)
        self.trace.reported(step, stage)

    def settled(self, settled: Settled) -> None:
        self.schedule.settled(settled)
        self.trace.settled(settled)

    def stage_died(self, stage: int, cause: str) -> None:
        self.metrics.stage_restarted(stage, cause)

    def load(self, running: int, waiting: int, in_flight: int, kv_usage: float) -> None:
        self.metrics.load(running, waiting, in_flight, kv_usage)
        self.trace.load(running, waiting, kv_usage)

    def guessed(self, outcomes: Mapping[str, int]) -> None:
        self.metrics.guessed(outcomes)

    def refused(self, error: RequestError) -> None:
        self.metrics.refused(error)

    def output(self, opened: OpenRequest, output: TokenOutput, now_s: float) -> None:
        self.metrics.output(opened, output, now_s)
