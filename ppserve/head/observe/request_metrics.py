"""What Prometheus sees of requests: how many, how they ended, how long they took."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Histogram

from ppserve.core.request import FinishReason
from ppserve.errors import RequestError
from ppserve.head.engine.observer import Observer
from ppserve.head.engine.open_request import OpenRequest
from ppserve.head.engine.output import TokenOutput

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


class RequestMetrics(Observer):
    """The metrics of requests, by the replica that computed a request last; "" for one that none has computed."""

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
        for replica, reason in product(("", *replicas), (*(r.value for r in FinishReason), *STATUSES)):
            self.ended.labels(replica, reason)
        self.prompt = counter("ppserve_prompt_tokens", "Prompt tokens of admitted requests.", ["replica"])
        cached_text = "Prompt tokens found in the prefix cache."
        self.cached = counter("ppserve_cached_prompt_tokens", cached_text, ["replica"])
        self.generated = counter("ppserve_generated_tokens", "Tokens generated.", ["replica"])
        for replica, family in product(replicas, (self.ttft, self.itl, self.tpot, self.duration, self.queue)):
            family.labels(replica)
        for replica, total in product(replicas, (self.prompt, self.cached, self.generated)):
            total.labels(replica)

    def on_output(self, opened: OpenRequest, output: TokenOutput, now_s: float) -> None:
        replica = "" if opened.replica is None else str(opened.replica)
        if opened.num_outputs == 1 and opened.admitted_s is not None:
            self.queue.labels(replica).observe(max(0.0, opened.admitted_s - opened.arrived_s))
            self.prompt.labels(replica).inc(len(opened.request.prompt_ids))
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
        self.generated.labels(replica).inc()
        gap_s = opened.progress(index).gap_s
        if opened.num_tokens == 1:
            self.ttft.labels(replica).observe(now_s - opened.arrived_s)
        elif gap_s is not None:
            self.itl.labels(replica).observe(gap_s)

    def _end_sequence(self, opened: OpenRequest, output: TokenOutput, replica: str) -> None:
        if output.cached_tokens:
            self.cached.labels(replica).inc(output.cached_tokens)
        progress = opened.progress(output.index)
        first_s, last_s = progress.first_token_s, progress.last_token_s
        if first_s is not None and last_s is not None and progress.num_tokens > 1:
            self.tpot.labels(replica).observe((last_s - first_s) / (progress.num_tokens - 1))
