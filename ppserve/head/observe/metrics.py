"""The Prometheus metrics of all stages: one registry, served at `/metrics` by the head.

Names never change: users' dashboards depend on them. They use base units and no colons, and no label's values grow
with the number of requests. Every label set is there from the start with the value zero, so that rates are right
from the first event on.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from ppserve.core.ledger.account import StageTimes
from ppserve.core.ledger.causes import BUSY
from ppserve.core.ledger.steps import Step
from ppserve.core.request import FinishReason
from ppserve.core.scheduling.lanes import OUTCOMES
from ppserve.errors import RequestError
from ppserve.head.cards import ModelCard, Topology
from ppserve.head.engine.open_request import OpenRequest
from ppserve.head.engine.output import TokenOutput
from ppserve.head.observe.pages import Page

# Without this, every counter has a second series with the time at which it was created.
disable_created_metrics()  # type: ignore[no-untyped-call]

STATUSES = (
    "INVALID_ARGUMENT",
    "UNIMPLEMENTED",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "UNAUTHENTICATED",
    "INTERNAL",
)
RESTART_CAUSES = ("exit", "frozen", "stuck", "late", "timeout", "protocol", "forming")

STEP_BUCKETS = tuple(50e-6 * 2**k for k in range(16))
TTFT_BUCKETS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 30, 60,
)  # fmt: skip
TOKEN_BUCKETS = (
    0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015,
    0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5,
)  # fmt: skip
QUEUE_BUCKETS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
DURATION_BUCKETS = (0.0005, 0.002, *(0.005 * 2**k for k in range(15)))
ROWS_BUCKETS = tuple(2**k for k in range(13))


@dataclass(frozen=True, slots=True)
class Latency:
    """A cumulative histogram since the start. counts: of values up to each bound."""

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """The load of the server now, and its counters since the start. kv_usage: 0 to 1."""

    running: int
    waiting: int
    in_flight: int
    kv_usage: float
    requests: int
    prompt_tokens: int
    generated_tokens: int
    ttft: Latency
    itl: Latency


class Metrics:
    """Written by the engine's thread and the event loop, read by the threads that make pages."""

    def __init__(self, num_stages: int) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._requests = _RequestMetrics(self.registry)
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        stages = [str(stage) for stage in range(num_stages)]
        step_text = "Compute time of one step on one stage."
        step = histogram("ppserve_stage_step_seconds", step_text, ["stage", "phase"], buckets=STEP_BUCKETS)
        self._step = [{phase: step.labels(stage, phase) for phase in BUSY} for stage in stages]
        transfer_text = "From computed on this stage, or from when the next was ready for it, to received there."
        transfer = histogram("ppserve_transfer_seconds", transfer_text, ["stage"], buckets=STEP_BUCKETS)
        self._transfer = [transfer.labels(stage) for stage in stages[:-1]]
        transfer_bytes = counter("ppserve_transfer_bytes", "Hidden states sent by this stage.", ["stage"])
        self._transfer_bytes = [transfer_bytes.labels(stage) for stage in stages[:-1]]
        tokens = histogram("ppserve_microbatch_tokens", "Rows of a step.", ["phase"], buckets=ROWS_BUCKETS)
        self._tokens = {phase: tokens.labels(phase) for phase in BUSY}
        self._in_flight = gauge("ppserve_microbatches_in_flight", "Steps in the pipeline.")
        self._kv_usage = gauge("ppserve_kv_usage_ratio", "Share of KV blocks in use.")
        guesses = counter("ppserve_draft_tokens", "Guessed tokens, by what became of them.", ["outcome"])
        self._guesses = {outcome: guesses.labels(outcome) for outcome in OUTCOMES}
        self._num_guesses = dict.fromkeys(OUTCOMES, 0)
        self._restarts = counter("ppserve_stage_restarts", "Stages that died, by how.", ["stage", "cause"])
        for stage, cause in product(stages, RESTART_CAUSES):
            self._restarts.labels(stage, cause)
        where = ["stage", "rank", "host", "device", "layers", "params"]
        self._stage_info = gauge("ppserve_stage_info", "What runs where; the value is 1.", where)
        what = ["version", "python", "model", "dtype"]
        self._build_info = gauge("ppserve_build_info", "What is served by what; the value is 1.", what)
        self._http = counter("ppserve_http_requests", "Answers over HTTP, by path and status.", ["path", "status"])

    # ---- what is read ---------------------------------------------------------------------------------

    def read_ledger(self, stage_times: Callable[[], tuple[StageTimes, ...]]) -> None:
        """Show the ledger too. stage_times: called at every scrape; all stages at one moment."""
        self.registry.register(_LedgerCollector(stage_times))

    def page(self) -> Page:
        """All metrics now, as Prometheus reads them."""
        return Page(CONTENT_TYPE_LATEST, generate_latest(self.registry))

    def reading(self) -> Load:
        """The figures that the live page shows."""
        requests = self._requests
        return Load(
            running=int(_value(requests.running)),
            waiting=int(_value(requests.waiting)),
            in_flight=int(_value(self._in_flight)),
            kv_usage=_value(self._kv_usage),
            requests=int(sum(_value(ended) for ended in requests.ended.values())),
            prompt_tokens=int(_value(requests.prompt)),
            generated_tokens=int(_value(requests.generated)),
            ttft=_latency(requests.ttft),
            itl=_latency(requests.itl),
        )

    # ---- what is served -------------------------------------------------------------------------------

    def describe(self, card: ModelCard, topology: Topology) -> None:
        """Sets the info metrics: which stage runs where, and what is served."""
        for stage in topology.stages:
            where = (stage.stage, stage.rank, stage.host, stage.device, stage.blocks, stage.num_parameters)
            self._stage_info.labels(*map(str, where)).set(1)
        self._build_info.labels(card.version, platform.python_version(), card.name, card.dtype).set(1)

    def dispatched(self, step: Step) -> None:
        self._tokens[step.plan.phase].observe(step.plan.num_tokens)

    def reported(self, step: Step, stage: int) -> None:
        stamps = step.stamps(stage)
        assert stamps is not None
        self._step[stage][step.plan.phase].observe((stamps.ended - stamps.begun) / 1e9)
        for transfer in step.transfers(stage):
            self._transfer[transfer.sender].observe(transfer.waited_ns / 1e9)
            self._transfer_bytes[transfer.sender].inc(transfer.num_bytes)

    def load(self, running: int, waiting: int, in_flight: int, kv_usage: float) -> None:
        self._requests.running.set(running)
        self._requests.waiting.set(waiting)
        self._in_flight.set(in_flight)
        self._kv_usage.set(kv_usage)

    def guessed(self, outcomes: Mapping[str, int]) -> None:
        """outcomes: guessed tokens so far, by what became of them."""
        if outcomes != self._num_guesses:
            for outcome, count in outcomes.items():
                self._guesses[outcome].inc(count - self._num_guesses[outcome])
            self._num_guesses = dict(outcomes)

    def stage_restarted(self, stage: int, cause: str) -> None:
        self._restarts.labels(str(stage), cause).inc()

    def output(self, opened: OpenRequest, output: TokenOutput, now_s: float) -> None:
        self._requests.output(opened, output, now_s)

    def refused(self, error: RequestError) -> None:
        self._requests.ended[error.status].inc()

    def http_expected(self, path: str, statuses: Iterable[int]) -> None:
        for status in statuses:
            self._http.labels(path, str(status))

    def http_answered(self, path: str, status: int) -> None:
        self._http.labels(path, str(status)).inc()


def _value(metric: Counter | Gauge) -> float:
    return next(sample.value for family in metric.collect() for sample in family.samples)


def _latency(histogram: Histogram) -> Latency:
    buckets = [s for family in histogram.collect() for s in family.samples if s.name.endswith("_bucket")]
    return Latency(tuple(float(s.labels["le"]) for s in buckets[:-1]), tuple(int(s.value) for s in buckets))


class _RequestMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"ppserve_{name}_seconds", text, buckets=buckets, registry=registry)

        self.ttft = histogram("time_to_first_token", "From arrival to a request's first token.", TTFT_BUCKETS)
        self.itl = histogram("inter_token_latency", "Between two tokens of a sequence.", TOKEN_BUCKETS)
        tpot_text = "Mean over a sequence's tokens after its first."
        self.tpot = histogram("time_per_output_token", tpot_text, TOKEN_BUCKETS)
        self.duration = histogram("request_duration", "From arrival to a request's end.", DURATION_BUCKETS)
        self.queue = histogram("request_queue", "From arrival to admission.", QUEUE_BUCKETS)
        ended = counter("ppserve_requests", "Requests that ended, by how.", ["reason"])
        self.ended = {reason: ended.labels(reason) for reason in (*(r.value for r in FinishReason), *STATUSES)}
        self.prompt = counter("ppserve_prompt_tokens", "Prompt tokens of admitted requests.")
        self.cached = counter("ppserve_cached_prompt_tokens", "Prompt tokens found in the prefix cache.")
        self.generated = counter("ppserve_generated_tokens", "Tokens generated.")
        self.running = gauge("ppserve_requests_running", "Admitted sequences.")
        self.waiting = gauge("ppserve_requests_waiting", "Requests in the queue.")
        # Of every open request that has had an output: when the last token of each sequence came, by index.
        self._last_token_s: dict[str, dict[int, float]] = {}

    def output(self, opened: OpenRequest, output: TokenOutput, now_s: float) -> None:
        request_id = opened.request.id
        if request_id not in self._last_token_s:
            self._last_token_s[request_id] = {}
            self._admitted(opened)
        if output.token_id is not None:
            self._token(opened, output.index, now_s)
        if output.finish is not None:
            self._sequence_ended(opened, output)
        if opened.is_complete:
            del self._last_token_s[request_id]
            self.duration.observe(now_s - opened.arrived_s)
            reason = output.finish or (output.error.status if output.error else "INTERNAL")
            self.ended[reason].inc()

    def _admitted(self, opened: OpenRequest) -> None:
        if opened.admitted_s is not None:
            self.queue.observe(max(0.0, opened.admitted_s - opened.arrived_s))
            self.prompt.inc(len(opened.request.prompt_ids))

    def _token(self, opened: OpenRequest, index: int, now_s: float) -> None:
        last_token_s = self._last_token_s[opened.request.id]
        self.generated.inc()
        if not last_token_s:
            self.ttft.observe(now_s - opened.arrived_s)
        elif index in last_token_s:
            self.itl.observe(now_s - last_token_s[index])
        last_token_s[index] = now_s

    def _sequence_ended(self, opened: OpenRequest, output: TokenOutput) -> None:
        self.cached.inc(output.cached_tokens)
        first_s, last_s, num_tokens = opened.token_times(output.index)
        if first_s is not None and last_s is not None and num_tokens > 1:
            self.tpot.observe((last_s - first_s) / (num_tokens - 1))


class _LedgerCollector(Collector):
    """The ledger of all stages, from one reading per scrape."""

    def __init__(self, stage_times: Callable[[], tuple[StageTimes, ...]]) -> None:
        self._stage_times = stage_times

    def describe(self) -> Iterable[Metric]:
        return self._families(())

    def collect(self) -> Iterable[Metric]:
        return self._families(self._stage_times())

    def _families(self, stages: tuple[StageTimes, ...]) -> tuple[Metric, ...]:
        busy = CounterMetricFamily(
            "ppserve_stage_busy_seconds", "Time a stage computed.", labels=["stage", "phase"]
        )
        bubble = CounterMetricFamily(
            "ppserve_stage_bubble_seconds",
            "Time a stage waited while the server had work, by cause.",
            labels=["stage", "cause"],
        )
        idle = CounterMetricFamily(
            "ppserve_stage_idle_seconds", "Time the server had no work at all.", labels=["stage"]
        )
        wasted = CounterMetricFamily(
            "ppserve_stage_wasted_seconds", "Of the busy time, that of steps on wrong guesses.", labels=["stage"]
        )
        for number, times in enumerate(stages):
            stage = str(number)
            wasted.add_metric([stage], times.wasted_ns / 1e9)
            for phase, ns in times.busy_ns.items():
                busy.add_metric([stage, phase], ns / 1e9)
            for cause, ns in times.bubble_ns.items():
                bubble.add_metric([stage, cause], ns / 1e9)
            idle.add_metric([stage], times.idle_ns / 1e9)
        return busy, bubble, idle, wasted
