"""What the engine sees, told to those who keep count of it: the ledger, the metrics and the trace.

Runs in the engine's thread.
"""

from __future__ import annotations

from collections import defaultdict

from ppserve.core.cost_model import PipelineCosts
from ppserve.core.ledger.account import Settled, StageTimes, TimeAccount
from ppserve.core.ledger.overheads import Overheads
from ppserve.core.plan import StepPlan, StepResult
from ppserve.core.scheduling.scheduler import Scheduler
from ppserve.errors import RequestError
from ppserve.head.engine.open_request import OpenRequest
from ppserve.head.engine.output import TokenOutput
from ppserve.head.observe.live import Schedule
from ppserve.head.observe.metrics import Metrics
from ppserve.head.observe.trace import Trace


class Observer:
    """Fed by the engine as things happen.

    account: every stage's time. costs, overheads: what steps take, and what surrounds them, learnt from them.
    trace: off until it is started. schedule: the last of the ledger's spans, for the live page.
    """

    def __init__(self, account: TimeAccount, metrics: Metrics, trace: Trace) -> None:
        self.account = account
        self.costs = PipelineCosts(account.num_stages)
        self.overheads = Overheads(account.num_stages)
        self.metrics = metrics
        self.trace = trace
        self.schedule = Schedule(account.num_stages)
        account.observer = self._settled
        self._step_s: defaultdict[int, float] = defaultdict(float)
        self._steps: defaultdict[int, int] = defaultdict(int)

    # ---- steps ----------------------------------------------------------------------------------------

    def dispatched(self, plan: StepPlan, now_ns: int, woken_ns: int) -> None:
        """A plan went out to all stages. woken_ns: when the turn that made it began."""
        self.account.dispatched(plan, now_ns, woken_ns)
        self.overheads.dispatched(plan, now_ns, woken_ns)
        self.metrics.microbatch(plan.phase, plan.num_tokens)

    def step_done(self, result: StepResult, plan: StepPlan, now_ns: int) -> None:
        """A stage reported a step; its stamps are on the head's clock."""
        self.account.reported(result, result.stamps, now_ns)
        self.overheads.reported(result, now_ns)
        self.metrics.step_done(result, plan.phase)
        self.trace.step_done(result, plan)
        seconds = (result.stamps.ended - result.stamps.begun) / 1e9
        self.costs.observe(result.stage, plan, seconds)
        self._step_s[result.stage] += seconds
        self._steps[result.stage] += 1

    def gauges(self, scheduler: Scheduler) -> None:
        """How full everything is right now."""
        self.metrics.load(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            in_flight=scheduler.num_in_flight,
            kv_usage=scheduler.kv_usage,
        )
        self.trace.load(scheduler.num_running, scheduler.num_waiting, scheduler.kv_usage)

    # ---- the pipeline ---------------------------------------------------------------------------------

    def stage_died(self, stage: int, cause: str) -> None:
        self.metrics.stage_restarted(stage, cause)

    def _settled(self, settled: Settled) -> None:
        self.schedule.settled(settled)
        self.trace.settled(settled)

    def lost(self, now_ns: int) -> None:
        self.account.stage_lost(now_ns)
        self.metrics.epoch_lost()
        self.overheads.lost()

    def formed(self, now_ns: int) -> None:
        self.account.formed(now_ns)

    # ---- requests -------------------------------------------------------------------------------------

    def demand(self, exists: bool, now_ns: int) -> None:
        """Whether the server has any work: without it stages are idle, with it they have bubbles."""
        if exists:
            self.account.demand_began(now_ns)
        else:
            self.account.demand_ended(now_ns)

    def refused(self, error: RequestError) -> None:
        """A request ended before it was queued."""
        self.metrics.refused(error)

    def output(self, opened: OpenRequest, output: TokenOutput, now_s: float) -> None:
        """A stream hears of a token, an end, or both."""
        self.metrics.output(opened, output, now_s)

    def stage_times(self, now_ns: int) -> tuple[StageTimes, ...]:
        """Every stage's time up to now."""
        return self.account.snapshot(now_ns)

    def mean_step_s(self, stage: int) -> float | None:
        """Mean compute seconds of a step so far; None before the first."""
        seconds, steps = self._step_s[stage], self._steps[stage]
        return seconds / steps if steps else None

    def stage_busy_s(self) -> tuple[float, ...]:
        """Seconds that every stage has computed, as far as is settled."""
        return tuple(sum(times.busy_ns.values()) / 1e9 for times in self.account.settled())
