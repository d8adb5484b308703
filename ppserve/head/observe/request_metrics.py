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
        # Of every open request that has had an output: when the last token of each sequence came, by index.
        self._last_token_s: dict[str, dict[int, float]] = {}

    def on_output(self, opened: OpenRequest, output: TokenOutput, now_s: float) -> None:
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
            self.duration.labels(_replica(opened)).observe(now_s - opened.arrived_s)
            # After an error the caller leaves, and its other answers are cancelled.
            reason = opened.error.status if opened.error else output.finish
            self.ended.labels(_replica(opened), reason).inc()

    def on_refused(self, error: RequestError) -> None:
        self.ended.labels("", error.status).inc()

    def _admitted(self, opened: OpenRequest) -> None:
        if opened.admitted_s is not None:
            self.queue.labels(_replica(opened)).observe(max(0.0, opened.admitted_s - opened.arrived_s))
            self.prompt.labels(_replica(opened)).inc(len(opened.request.prompt_ids))

    def _token(self, opened: OpenRequest, index: int, now_s: float) -> None:
        last_token_s, replica = self._last_token_s[opened.request.id], _replica(opened)
        self.generated.labels(replica).inc()
        if not last_token_s:
            self.ttft.labels(replica).observe(now_s - opened.arrived_s)
        elif index in last_token_s:
            self.itl.labels(replica).observe(now_s - last_token_s[index])
        last_token_s[index] = now_s

    def _sequence_ended(self, opened: OpenRequest, output: TokenOutput) -> None:
        if output.cached_tokens:
            self.cached.labels(_replica(opened)).inc(output.cached_tokens)
        first_s, last_s, num_tokens = opened.token_times(output.index)
        if first_s is not None and last_s is not None and num_tokens > 1:
            self.tpot.labels(_replica(opened)).observe((last_s - first_s) / (num_tokens - 1))


def _replica(opened: OpenRequest) -> str:
    return "" if opened.replica is None else str(opened.replica)
