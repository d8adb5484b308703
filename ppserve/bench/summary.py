"""Computes the figures that people compare from measurements. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ppserve.bench.caller import Answer
from ppserve.bench.ledger import CAUSES, StageSeconds

OBJECTIVES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Setting:
    """What was measured, for the record. request_rate: requests per second; inf for a closed loop."""

    target: str
    model: str
    dtype: str
    num_stages: int
    microbatches: int
    max_concurrency: int | None
    request_rate: float
    seed: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run, as measured. duration_s: from the first request to the last answer. ledger: the stages' time
    meanwhile. client_cpu_s: the load generator's own CPU time. was_interrupted: Ctrl-C ended it early."""

    setting: Setting
    answers: Sequence[Answer]
    duration_s: float
    ledger: StageSeconds = ()
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
        mean = math.fsum(ordered) / len(ordered)
        std = math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / len(ordered))
        return cls(mean, percentile(ordered, 50), std, *(percentile(ordered, p) for p in (90, 95, 99)))


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of sorted values; linear between the two nearest ones."""
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run. Throughputs are per second; latencies are of successful requests."""

    setting: Setting
    duration_s: float
    completed: int
    failed: int
    clipped: int
    statuses: Mapping[str, int]
    problems: Mapping[str, str]
    input_tokens: int
    output_tokens: int
    request_throughput: float
    request_goodput: float | None
    output_throughput: float
    total_token_throughput: float
    peak_output_throughput: float
    peak_concurrency: int
    ttft: Distribution
    tpot: Distribution
    itl: Distribution
    e2el: Distribution
    start_delay: Distribution
    client_cores: float
    ledger: StageSeconds
    server_side: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """A flat object; figures that vLLM's serving benchmark has as well have its keys."""
        latencies = {
            f"{statistic}_{name}_ms": value
            for name in ("ttft", "tpot", "itl", "e2el", "start_delay")
            for statistic, value in asdict(getattr(self, name)).items()
        }
        setting = asdict(self.setting)
        rate = self.setting.request_rate
        return {
            "backend": "ppserve",
            "model_id": setting.pop("model"),
            **setting,
            "request_rate": "inf" if math.isinf(rate) else rate,
            "num_prompts": self.completed + self.failed,
            "duration": self.duration_s,
            "completed": self.completed,
            "failed": self.failed,
            "clipped": self.clipped,
            "errors_by_status": dict(self.statuses),
            "total_input_tokens": self.input_tokens,
            "total_output_tokens": self.output_tokens,
            "request_throughput": self.request_throughput,
            "request_goodput": self.request_goodput,
            "output_throughput": self.output_throughput,
            "total_token_throughput": self.total_token_throughput,
            "max_output_tokens_per_s": self.peak_output_throughput,
            "max_concurrent_requests": self.peak_concurrency,
            **latencies,
            "client_cores": self.client_cores,
            "stages": [_stage_json(self.ledger, place) for place in range(len(self.ledger))],
            "server": dict(self.server_side),
        }


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
        duration_s=measured.duration_s,
        completed=len(good),
        failed=len(bad),
        clipped=sum(answer.question.was_clipped for answer in measured.answers),
        statuses=dict(Counter(answer.status for answer in bad).most_common()),
        problems={answer.status: answer.problem for answer in reversed(bad)},
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        request_throughput=len(good) / duration_s,
        request_goodput=None if kept is None else kept / duration_s,
        output_throughput=output_tokens / duration_s,
        total_token_throughput=(input_tokens + output_tokens) / duration_s,
        peak_output_throughput=_peak_tokens_per_s(with_tokens),
        peak_concurrency=_peak_concurrency(measured.answers),
        ttft=Distribution.of([answer.ttft_s for answer in with_tokens]),
        tpot=Distribution.of([tpot for answer in with_tokens if (tpot := answer.tpot_s) is not None]),
        itl=Distribution.of([gap for answer in with_tokens for gap in answer.itls_s]),
        e2el=Distribution.of([answer.e2e_s for answer in good]),
        start_delay=Distribution.of([answer.sent_s - answer.intended_s for answer in measured.answers]),
        client_cores=measured.client_cpu_s / duration_s,
        ledger=measured.ledger,
        server_side=dict(measured.server_side or {}),
    )


def parse_objectives(texts: Sequence[str]) -> dict[str, float]:
    """`ttft:500 tpot:50` in any grouping. Raises ValueError."""
    objectives: dict[str, float] = {}
    for text in " ".join(texts).replace(",", " ").split():
        name, _, limit = text.partition(":")
        if name not in OBJECTIVES:
            raise ValueError(f"{text!r} is not an objective such as ttft:500, tpot:50 or e2el:2000 (milliseconds)")
        objectives[name] = float(limit)
        if not objectives[name] > 0:
            raise ValueError(f"{text!r}: the limit must be above 0 milliseconds")
    return objectives


def _keeps(answer: Answer, objectives: Mapping[str, float]) -> bool:
    # An answer of one token has no time between tokens: it keeps every limit on that.
    took_s = {"ttft": answer.ttft_s, "tpot": answer.tpot_s or 0.0, "e2el": answer.e2e_s}
    return all(1e3 * took_s[name] <= limit for name, limit in objectives.items())


def _peak_tokens_per_s(answers: Sequence[Answer]) -> float:
    """Tokens of the second with most of them; seconds are counted from the first request on."""
    if not answers:
        return 0.0
    begun_s = min(answer.intended_s for answer in answers)
    seconds: Counter[int] = Counter()
    for answer in answers:
        for at_s, num_tokens in answer.arrivals:
            seconds[int(at_s - begun_s)] += num_tokens
    return float(max(seconds.values(), default=0))


def _peak_concurrency(answers: Sequence[Answer]) -> int:
    """The most requests at the server at any moment; one that ends when another begins does not overlap it."""
    changes = sorted([(a.sent_s, 1) for a in answers] + [(a.ended_s, -1) for a in answers])
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def _stage_json(ledger: StageSeconds, place: int) -> dict[str, Any]:
    """Seconds, and shares: busy and bubble of demand time, idle of wall time."""
    times = ledger[place]
    return {
        "stage": times.stage,
        "busy_seconds": times.busy_s,
        "idle_seconds": times.idle_s,
        "bubble_seconds": dict(times.bubble_s),
        "busy_share": times.busy_share,
        "idle_share": times.idle_share,
        "bubble_share": times.bubble_share(),
        "bubble_share_by_cause": {cause: times.bubble_share(cause) for cause in CAUSES},
    }
