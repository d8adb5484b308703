"""The Prometheus metrics of all stages: one registry, served at `/metrics` by the head.

Dashboards depend on names, which never change. No label's values grow with the number of requests.
Every label set starts at zero, so rates are right from the first event on.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from ppserve.core.ledger.account import StageTimes
from ppserve.core.ledger.causes import BUSY
from ppserve.core.ledger.steps import Step
from ppserve.core.request import FinishReason
from ppserve.core.scheduling.scheduler import DRAFT_OUTCOMES, Scheduler
from ppserve.errors import RequestError
from ppserve.head.descriptions import ModelDescription, StageDescription, describe_stages
from ppserve.head.engine.control import LossCause
from ppserve.head.engine.replica import ReplicaReading, StepObserver
from ppserve.head.engine.streams import OpenRequest, TokenOutput
from ppserve.head.observe.pages import Page

# Without this every counter has a second series, with its time of creation.
disable_created_metrics()  # type: ignore[no-untyped-call]

Family = Counter | Gauge | Histogram
ReadPipelines = Callable[[], Sequence[ReplicaReading]]

STATUSES = (
    "INVALID_ARGUMENT",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "UNAUTHENTICATED",
    "INTERNAL",
)
TTFT_BUCKETS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 30, 60,
)  # fmt: skip
TOKEN_BUCKETS = (
    0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015,
    0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5,
)  # fmt: skip
QUEUE_BUCKETS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
DURATION_BUCKETS = (0.0005, 0.002, *(0.005 * 2**k for k in range(15)))
STEP_BUCKETS = tuple(50e-6 * 2**k for k in range(16))
ROWS_BUCKETS = tuple(2**k for k in range(13))


class RequestMetrics:
    """Metrics of requests, by the replica that computed each last; the label is empty if none did."""

    def __init__(self, registry: CollectorRegistry, replicas: Sequence[str]) -> None:
        counter = partial(Counter, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            name = f"ppserve_{name}_seconds"
            return Histogram(name, text, ["replica"], buckets=buckets, registry=registry)

        self.ttft = histogram("time_to_first_token", "From arrival to a request's first token.", TTFT_BUCKETS)
        self.itl = histogram("inter_token_latency", "Between two tokens of a sequence.", TOKEN_BUCKETS)
        tpot_text = "Mean over a sequence's tokens after its first."
        self.tpot = histogram("time_per_output_token", tpot_text, TOKEN_BUCKETS)
        self.duration = histogram("request_duration", "From arrival to a request's end.", DURATION_BUCKETS)
        self.queue = histogram("request_queue", "From arrival to admission.", QUEUE_BUCKETS)
        ended_text = (
            "Requests that ended, by how: also calls without an accepted key, and messages and bodies that hold no"
            " request. Not what gRPC refuses itself: messages, metadata and calls beyond its limits."
        )
        self.ended = counter("ppserve_requests", ended_text, ["replica", "reason"])
        self.prompt = counter("ppserve_prompt_tokens", "Prompt tokens of admitted requests.", ["replica"])
        cached_text = "Prompt tokens found in the prefix cache."
        self.cached = counter("ppserve_cached_prompt_tokens", cached_text, ["replica"])
        self.generated = counter("ppserve_generated_tokens", "Tokens generated.", ["replica"])
        self._begin_at_zero(replicas)
        # `labels` is slow, so its results are kept for what is counted with every token.
        self._generated = {r: self.generated.labels(r) for r in replicas}
        self._itl = {r: self.itl.labels(r) for r in replicas}

    def _begin_at_zero(self, replicas: Sequence[str]) -> None:
        reasons = (*(reason.value for reason in FinishReason), *STATUSES)
        for replica, reason in product(("", *replicas), reasons):
            self.ended.labels(replica, reason)
        histograms: list[Family] = [self.ttft, self.itl, self.tpot, self.duration, self.queue]
        families = [*histograms, self.prompt, self.cached, self.generated]
        for replica, family in product(replicas, families):
            family.labels(replica)

    def on_output(self, opened: OpenRequest, output: TokenOutput, now_s: float) -> None:
        replica = "" if opened.replica is None else str(opened.replica)
        if opened.num_outputs == 1 and opened.admitted_s is not None:
            self.queue.labels(replica).observe(max(0.0, opened.admitted_s - opened.arrived_s))
            self.prompt.labels(replica).inc(len(opened.request.prompt_ids))
            self.cached.labels(replica).inc(output.cached_tokens)
        if output.token_id is not None:
            self._count_token(opened, output.index, replica, now_s)
        if output.finish is not None:
            self._end_sequence(opened, output, replica)
        if opened.is_complete:
            self.duration.labels(replica).observe(now_s - opened.arrived_s)
            # After an error the caller leaves, and its other answers are cancelled.
            reason = opened.error.status if opened.error else output.finish
            self.ended.labels(replica, reason).inc()

    def on_refused(self, error: RequestError) -> None:
        self.ended.labels("", error.status).inc()

    def _count_token(self, opened: OpenRequest, index: int, replica: str, now_s: float) -> None:
        self._generated[replica].inc()
        gap_s = opened.progress(index).gap_s
        if opened.num_tokens == 1:
            self.ttft.labels(replica).observe(now_s - opened.arrived_s)
        elif gap_s is not None:
            self._itl[replica].observe(gap_s)

    def _end_sequence(self, opened: OpenRequest, output: TokenOutput, replica: str) -> None:
        progress = opened.progress(output.index)
        first_s = progress.first_token_s
        last_s = progress.last_token_s
        if first_s is not None and last_s is not None and progress.num_tokens > 1:
            mean_s = (last_s - first_s) / (progress.num_tokens - 1)
            self.tpot.labels(replica).observe(mean_s)


class StepMetrics(StepObserver):
    """Metrics of steps and stages, by replica."""

    def __init__(self, registry: CollectorRegistry, replicas: Sequence[str], stages: Sequence[str]) -> None:
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        labels = ["replica", "stage", "phase"]
        text = "Compute time of one step on one stage."
        step = histogram("ppserve_stage_step_seconds", text, labels, buckets=STEP_BUCKETS)
        labels = ["replica", "stage"]
        text = "From computed on this stage, or from when the next was ready for it, to received there."
        transfer = histogram("ppserve_transfer_seconds", text, labels, buckets=STEP_BUCKETS)
        text = "Hidden states sent by this stage."
        transfer_bytes = counter("ppserve_transfer_bytes", text, labels)
        labels = ["replica", "phase"]
        text = "Rows of a step."
        tokens = histogram("ppserve_microbatch_tokens", text, labels, buckets=ROWS_BUCKETS)
        text = "Draft tokens, by what became of them."
        drafted = counter("ppserve_draft_tokens", text, ["replica", "outcome"])
        labels = ["replica", "stage", "cause"]
        self._restarts = counter("ppserve_stage_restarts", "Stages that died, by how.", labels)
        text = "CPU time in which a token filter made a mask."
        self._mask = histogram("ppserve_mask_seconds", text, buckets=STEP_BUCKETS)
        self.in_flight = gauge("ppserve_microbatches_in_flight", "Steps in the pipeline.", ["replica"])
        self.kv_usage = gauge("ppserve_kv_usage_ratio", "Share of KV blocks in use.", ["replica"])
        self.running = gauge("ppserve_requests_running", "Admitted sequences.", ["replica"])
        self.waiting = gauge("ppserve_requests_waiting", "Requests in the queue of all replicas.")
        # `labels` is slow, so its results are kept: by replica, then by stage.
        self._step = [[{p: step.labels(r, s, p) for p in BUSY} for s in stages] for r in replicas]
        self._transfer = [[transfer.labels(r, s) for s in stages[:-1]] for r in replicas]
        self._transfer_bytes = [[transfer_bytes.labels(r, s) for s in stages[:-1]] for r in replicas]
        self._tokens = [{p: tokens.labels(r, p) for p in BUSY} for r in replicas]
        self._drafted = [{o: drafted.labels(r, o) for o in DRAFT_OUTCOMES} for r in replicas]
        self._num_drafted = [dict.fromkeys(DRAFT_OUTCOMES, 0) for _ in replicas]
        for replica, stage, cause in product(replicas, stages, LossCause):
            self._restarts.labels(replica, stage, cause)
        self._load = [tuple(f.labels(r) for f in (self.running, self.in_flight, self.kv_usage)) for r in replicas]

    def on_step_sent(self, replica: int, step: Step, scheduler: Scheduler) -> None:
        self._tokens[replica][step.phase].observe(step.num_tokens)

    def on_step_reported(self, replica: int, step: Step, stage: int) -> None:
        stamps = step.stamps(stage)
        assert stamps is not None
        self._step[replica][stage][step.phase].observe((stamps.ended - stamps.begun) / 1e9)
        for transfer in step.transfers(stage):
            self._transfer[replica][transfer.sender].observe(transfer.waited_ns / 1e9)
            self._transfer_bytes[replica][transfer.sender].inc(transfer.num_bytes)

    def on_mask(self, seconds: float) -> None:
        self._mask.observe(seconds)

    def on_load(self, replica: int, scheduler: Scheduler, in_flight: int, num_waiting: int) -> None:
        running, flying, kv_usage = self._load[replica]
        running.set(scheduler.num_running)
        flying.set(in_flight)
        kv_usage.set(scheduler.kv_usage)
        self.waiting.set(num_waiting)
        self._count_drafted(replica, scheduler.num_draft_tokens)

    def _count_drafted(self, replica: int, outcomes: Mapping[str, int]) -> None:
        before = self._num_drafted[replica]
        if outcomes != before:
            for outcome, count in outcomes.items():
                self._drafted[replica][outcome].inc(count - before[outcome])
            self._num_drafted[replica] = dict(outcomes)

    def on_stage_died(self, replica: int, stage: int, cause: LossCause) -> None:
        self._restarts.labels(str(replica), str(stage), cause).inc()


class Metrics:
    """All metrics. The engine and the event loop write them, and the threads of pages read them."""

    def __init__(self, num_stages: int, num_replicas: int = 1) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        replicas = [str(i) for i in range(num_replicas)]
        stages = [str(i) for i in range(num_stages)]
        self.requests = RequestMetrics(self.registry, replicas)
        self.steps = StepMetrics(self.registry, replicas, stages)
        self._num_replicas = num_replicas
        counter = partial(Counter, registry=self.registry)
        what = ["version", "python", "model", "dtype"]
        text = "What is served by what; the value is 1."
        self._build_info = Gauge("ppserve_build_info", text, what, registry=self.registry)
        http_text = "Answers over HTTP, by path and status."
        self._http = counter("ppserve_http_requests", http_text, ["path", "status"])
        log_text = "Lines of the head's log that nobody read, or a full disk did not take."
        self.log_lines_dropped = counter("ppserve_log_lines_dropped", log_text).inc
        self._pipelines = _PipelineCollector(num_replicas)
        self.registry.register(self._pipelines)

    def read_pipelines(self, read: ReadPipelines) -> None:
        """Add the ledger's metrics, and what runs where. read: each scrape calls it once, for all replicas."""
        self._pipelines.read = read

    def page(self) -> Page:
        return Page(CONTENT_TYPE_LATEST, generate_latest(self.registry))

    def read_load(self) -> dict[str, Any]:
        """Return the load now, and counters and latencies since the start."""
        requests, steps = self.requests, self.steps
        return {
            "running": int(_total(steps.running)),
            "waiting": int(_total(steps.waiting)),
            "in_flight": int(_total(steps.in_flight)),
            "kv_usage": _total(steps.kv_usage) / self._num_replicas,
            "requests": int(_total(requests.ended)),
            "prompt_tokens": int(_total(requests.prompt)),
            "generated_tokens": int(_total(requests.generated)),
            "ttft": _latency(requests.ttft),
            "itl": _latency(requests.itl),
        }

    def describe(self, description: ModelDescription) -> None:
        """Tell what is served."""
        self._build_info.labels(
            version=description.version,
            python=platform.python_version(),
            model=description.name,
            dtype=description.dtype,
        ).set(1)

    def http_answered(self, path: str, status: int) -> None:
        """Count an answer. path: the path of the request, or "other" if it is not served."""
        self._http.labels(path, str(status)).inc()


def _total(metric: Family) -> float:
    return sum(sample.value for family in metric.collect() for sample in family.samples)


def _latency(histogram: Histogram) -> dict[str, list[float]]:
    """Return how many values were at most each bound, over all labels; the last counts all."""
    counts: dict[float, int] = {}
    for family in histogram.collect():
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                bound = float(sample.labels["le"])
                counts[bound] = counts.get(bound, 0) + int(sample.value)
    bounds = sorted(counts)
    return {"bounds_s": bounds[:-1], "counts": [counts[bound] for bound in bounds]}


class _PipelineCollector(Collector):
    """The ledger of all stages, what runs where and which replicas serve, from one reading per scrape: layers may
    be divided anew."""

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self.read: ReadPipelines = tuple  # until the pipelines have formed there is nothing to read

    def describe(self) -> Iterable[Metric]:
        return self._families(())

    def collect(self) -> Iterable[Metric]:
        return self._families(self.read())

    def _families(self, readings: Sequence[ReplicaReading]) -> tuple[Metric, ...]:
        ledger, info = _ledger([reading.times for reading in readings]), _stage_info(describe_stages(readings))
        return (*ledger, info, self._serving(readings))

    def _serving(self, readings: Sequence[ReplicaReading]) -> Metric:
        text = "1 while all stages of a replica are there, so that it answers; else 0."
        serving = GaugeMetricFamily("ppserve_serving", text, labels=["replica"])
        for replica in range(self._num_replicas):
            serving.add_metric([str(replica)], float(bool(readings) and readings[replica].serves))
        return serving


def _ledger(replicas: Sequence[Sequence[StageTimes]]) -> tuple[Metric, ...]:
    def family(name: str, text: str, *labels: str) -> CounterMetricFamily:
        return CounterMetricFamily(f"ppserve_stage_{name}", text, labels=["replica", "stage", *labels])

    busy = family("busy_seconds", "Time a stage computed.", "phase")
    bubble_text = "Time a stage waited while the server had work, by cause."
    bubble = family("bubble_seconds", bubble_text, "cause")
    idle = family("idle_seconds", "Time the server had no work at all.")
    for replica, stages in enumerate(replicas):
        for stage, times in enumerate(stages):
            place = [str(replica), str(stage)]
            for phase, ns in times.busy_ns.items():
                busy.add_metric([*place, phase], ns / 1e9)
            for cause, ns in times.bubble_ns.items():
                bubble.add_metric([*place, cause], ns / 1e9)
            idle.add_metric(place, times.idle_ns / 1e9)
    return busy, bubble, idle


def _stage_info(stages: Sequence[StageDescription]) -> Metric:
    labels = ["replica", "stage", "rank", "host", "device", "layers", "params"]
    info = GaugeMetricFamily("ppserve_stage_info", "What runs where; the value is 1.", labels=labels)
    for stage in stages:
        for rank in stage.ranks:
            what = rank.host, rank.device, stage.layers, rank.num_parameters
            info.add_metric([str(each) for each in (stage.replica, stage.stage, rank.rank, *what)], 1)
    return info
