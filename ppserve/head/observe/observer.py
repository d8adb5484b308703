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
    """See the module. Of one replica, and of all requests. trace: off until it is started."""

    def __init__(self, metrics: Metrics, trace: Trace, schedule: RecentSpans, replica: int = 0) -> None:
        self.metrics = metrics
        self.trace = trace
        self.schedule = schedule
        self._replica = replica
        self._steps = metrics.replicas[replica]

    def dispatched(self, step: Step) -> None:
        self._steps.dispatched(step)

    def reported(self, step: Step, stage: int) -> None:
        self._steps.reported(step, stage)
        self.trace.reported(step, stage, self._replica)

    def settled(self, settled: Settled) -> None:
        self.schedule.settled(settled, self._replica)
        self.trace.settled(settled, self._replica)

    def stage_died(self, stage: int, cause: str) -> None:
        self._steps.stage_restarted(stage, cause)

    def load(self, running: int, waiting: int, in_flight: int, kv_usage: float) -> None:
        self._steps.load(running, waiting, in_flight, kv_usage)
        self.trace.load(running, waiting, kv_usage, self._replica)

    def drafted(self, outcomes: Mapping[str, int]) -> None:
        self._steps.drafted(outcomes)

    def refused(self, error: RequestError) -> None:
        self.metrics.refused(error)

    def output(self, opened: OpenRequest, output: TokenOutput, now_s: float) -> None:
        self.metrics.output(opened, output, now_s)
