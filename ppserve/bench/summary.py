"""Computes the figures that people compare from measurements. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from typing import Any

from ppserve.bench.caller import Answer
from ppserve.core.figures import percentile
from ppserve.core.ledger.account import StageTimes
from ppserve.core.ledger.causes import CAUSES

OBJECTIVES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Setting:
    """What was measured, for the record. num_stages: of each replica. num_tensor: ranks of each stage.
    request_rate: requests per second; inf for a closed loop."""

    target: str
    model_id: str
    dtype: str
    num_stages: int
    microbatches: int
    max_concurrency: int | None = None
    request_rate: float = math.inf
    seed: int = 0
    num_tensor: int = 1
    num_replicas: int = 1


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run, as measured. duration_s: from the first request to the last answer. ledger: the stages' time
    meanwhile. client_cpu_s: the load generator's own CPU time. was_interrupted: Ctrl-C ended it early."""

    setting: Setting
    answers: Sequence[Answer]
    duration_s: float
    ledger: tuple[StageTimes, ...] = ()
    client_cpu_s: float = 0.0
    server_side: Mapping[str, float] | None = None
    was_interrupted: bool = False


@dataclass(frozen=True, slots=True)
class Distribution:
    """Statistics of one latency, in milliseconds; all zero without observations."""

    mean: float = 0.0
    median: float = 0.0
    std: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Distribution:
        if not seconds:
            return cls()
        ordered = sorted(1e3 * value for value in seconds)
        median, *tail = (percentile(ordered, p) for p in (50, 90, 95, 99))
        return cls(statistics.fmean(ordered), median, statistics.pstdev(ordered), *tail)


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run, named as in vLLM's serving benchmark if that has them. duration: seconds.
    Throughputs are per second; latencies are of successful requests. problems: one message for each status."""

    setting: Setting
    num_prompts: int
    duration: float
    completed: int
    failed: int
    clipped: int
    errors_by_status: Mapping[str, int]
    problems: Mapping[str, str]
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    request_goodput: float | None
    output_throughput: float
    total_token_throughput: float
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    ttft: Distribution
    tpot: Distribution
    itl: Distribution
    e2el: Distribution
    start_delay: Distribution
    client_cores: float
    stages: tuple[StageTimes, ...]
    server: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """A flat object."""
        flat: dict[str, Any] = {"backend": "ppserve", **asdict(self.setting)}
        if math.isinf(self.setting.request_rate):
            flat["request_rate"] = "inf"
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Distribution):
                flat |= {f"{statistic}_{field.name}_ms": ms for statistic, ms in asdict(value).items()}
            elif field.name not in ("setting", "problems"):
                flat[field.name] = value
        places = (divmod(index, self.setting.num_stages) for index in range(len(self.stages)))
        each = [
            {"replica": replica, "stage": stage, **_stage_json(times)}
            for (replica, stage), times in zip(places, self.stages, strict=True)
        ]
        return flat | {"stages": each}


def summarize(measured: Measurement, objectives: Mapping[str, float] | None = None) -> Summary:
    """objectives: limits in milliseconds by name (of OBJECTIVES); a request that keeps all counts for goodput."""
    good = [answer for answer in measured.answers if answer.is_ok]
    bad = [answer for answer in measured.answers if not answer.is_ok]
    with_tokens = [answer for answer in good if answer.arrivals]
    input_tokens = sum(len(answer.question.prompt_ids) for answer in good)
    output_tokens = sum(answer.num_tokens for answer in good)
    duration_s = measured.duration_s or math.inf
    kept = sum(_keeps(answer, objectives) for answer in with_tokens) if objectives else None
    return Summary(
        setting=measured.setting,
        num_prompts=len(measured.answers),
        duration=measured.duration_s,
        completed=len(good),
        failed=len(bad),
        clipped=sum(answer.question.was_clipped for answer in measured.answers),
        errors_by_status=dict(Counter(answer.status for answer in bad).most_common()),
        problems={answer.status: answer.problem for answer in reversed(bad)},
        total_input_tokens=input_tokens,
        total_output_tokens=output_tokens,
        request_throughput=len(good) / duration_s,
        request_goodput=None if kept is None else kept / duration_s,
        output_throughput=output_tokens / duration_s,
        total_token_throughput=(input_tokens + output_tokens) / duration_s,
        max_output_tokens_per_s=max(tokens_by_second(with_tokens).values(), default=0.0),
        max_concurrent_requests=_peak_concurrency(measured.answers),
        ttft=Distribution.of([answer.ttft_s for answer in with_tokens]),
        tpot=Distribution.of([tpot for answer in with_tokens if (tpot := answer.tpot_s) is not None]),
        itl=Distribution.of([gap for answer in with_tokens for gap in answer.itls_s]),
        e2el=Distribution.of([answer.e2e_s for answer in good]),
        start_delay=Distribution.of([answer.sent_s - answer.intended_s for answer in measured.answers]),
        client_cores=measured.client_cpu_s / duration_s,
        stages=measured.ledger,
        server=dict(measured.server_side or {}),
    )


def parse_objectives(texts: Sequence[str]) -> dict[str, float]:
    """`ttft:500 tpot:50` in any grouping. Raises ValueError."""
    objectives: dict[str, float] = {}
    for text in " ".join(texts).replace(",", " ").split():
        name, _, limit = text.partition(":")
        try:
            objectives[name] = float(limit)
        except ValueError:
            objectives[name] = math.nan
        if name not in OBJECTIVES or not objectives[name] > 0:
            raise ValueError(f"{text!r} is not a limit above 0 such as ttft:500, tpot:50 or e2el:2000 (in ms)")
    return objectives


def _keeps(answer: Answer, objectives: Mapping[str, float]) -> bool:
    # An answer of one token has no time between tokens: it keeps every limit on that.
    took_s = {"ttft": answer.ttft_s, "tpot": answer.tpot_s or 0.0, "e2el": answer.e2e_s}
    return all(1e3 * took_s[name] <= limit for name, limit in objectives.items())


def tokens_by_second(answers: Sequence[Answer]) -> dict[int, float]:
    """Tokens that arrived in each second from the first request on; seconds without any are left out."""
    begun_s = min((answer.intended_s for answer in answers), default=0.0)
    tokens: dict[int, float] = {}
    for answer in answers:
        for at_s, num_tokens in answer.arrivals:
            second = int(at_s - begun_s)
            tokens[second] = tokens.get(second, 0.0) + num_tokens
    return tokens


def _peak_concurrency(answers: Sequence[Answer]) -> int:
    """The most requests at the server at any moment; one that ends when another begins does not overlap it."""
    changes = sorted([(a.sent_s, 1) for a in answers] + [(a.ended_s, -1) for a in answers])
    return max(accumulate(change for _, change in changes), default=0)


def _stage_json(times: StageTimes) -> dict[str, Any]:
    """Seconds, and shares: busy and bubble of demand time, idle of wall time."""
    return {
        "busy_seconds": times.computed_ns / 1e9,
        "idle_seconds": times.idle_ns / 1e9,
        "bubble_seconds": {cause: ns / 1e9 for cause, ns in times.bubble_ns.items()},
        "busy_share": times.busy_share,
        "idle_share": times.idle_share,
        "bubble_share": times.bubble_share(),
        "bubble_share_by_cause": {cause: times.bubble_share(cause) for cause in CAUSES},
    }
