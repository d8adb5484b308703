"""What Prometheus sees of requests: how many, how they ended, how long they took."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram

from ppserve.core.request import FinishReason
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


class _OfReplicas:
    """A metric of one label, which finds its children faster than `labels` does."""

    def __init__(self, family: Any, replicas: Sequence[str]) -> None:
        self.family = family
        self._children = {replica: family.labels(replica) for replica in replicas}

    def __getitem__(self, replica: str) -> Any:
        return self._children[replica] if replica in self._children else self.family.labels(replica)


class RequestMetrics:
    """Of the replica that computed a request last; without the label's value for one that none has computed."""

    def __init__(self, registry: CollectorRegistry, replicas: Sequence[str]) -> None:
        counter = partial(Counter, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> _OfReplicas:
            name = f"ppserve_{name}_seconds"
            return _OfReplicas(Histogram(name, text, ["replica"], buckets=buckets, registry=registry), replicas)

        def count(name: str, text: str) -> _OfReplicas:
            return _OfReplicas(counter(name, text, ["replica"]), replicas)

        self.ttft = histogram("time_to_first_token", "From arrival to a request's first token.", TTFT_BUCKETS)
        self.itl = histogram("inter_token_latency", "Between two tokens of a sequence.", TOKEN_BUCKETS)
        tpot_text = "Mean over a sequence's tokens after its first."
        self.tpot = histogram("time_per_output_token", tpot_text, TOKEN_BUCKETS)
        self.duration = histogram("request_duration", "From arrival to a request's end.", DURATION_BUCKETS)
        self.queue = histogram("request_queue", "From arrival to admission.", QUEUE_BUCKETS)
        self.ended = counter("ppserve_requests", "Requests that ended, by how.", ["replica", "reason"])
        for replica, reason in product(("", *replicas), (*(r.value for r in FinishReason), *STATUSES)):
            self.ended.labels(replica, reason)
        self.prompt = count("ppserve_prompt_tokens", "Prompt tokens of admitted requests.")
        self.cached = count("ppserve_cached_prompt_tokens", "Prompt tokens found in the prefix cache.")
        self.generated = count("ppserve_generated_tokens", "Tokens generated.")
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
            self.duration[_replica(opened)].observe(now_s - opened.arrived_s)
            # After an error the caller leaves, and its other answers are cancelled.
            reason = opened.error.status if opened.error else output.finish
            self.ended.labels(_replica(opened), reason).inc()

    def _admitted(self, opened: OpenRequest) -> None:
        if opened.admitted_s is not None:
            self.queue[_replica(opened)].observe(max(0.0, opened.admitted_s - opened.arrived_s))
            self.prompt[_replica(opened)].inc(len(opened.request.prompt_ids))

    def _token(self, opened: OpenRequest, index: int, now_s: float) -> None:
        last_token_s, replica = self._last_token_s[opened.request.id], _replica(opened)
        self.generated[replica].inc()
        if not last_token_s:
            self.ttft[replica].observe(now_s - opened.arrived_s)
        elif index in last_token_s:
            self.itl[replica].observe(now_s - last_token_s[index])
        last_token_s[index] = now_s

    def _sequence_ended(self, opened: OpenRequest, output: TokenOutput) -> None:
        if output.cached_tokens:
            self.cached[_replica(opened)].inc(output.cached_tokens)
        first_s, last_s, num_tokens = opened.token_times(output.index)
        if first_s is not None and last_s is not None and num_tokens > 1:
            self.tpot[_replica(opened)].observe((last_s - first_s) / (num_tokens - 1))


def _replica(opened: OpenRequest) -> str:
    return "" if opened.replica is None else str(opened.replica)
