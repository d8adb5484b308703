"""The figures that people compare, from a measurement; as a table and as JSON."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from ppserve.bench.caller import Answer
from ppserve.bench.measure import ClosedLoop, Measurement, Served
from ppserve.core.figures import percentile, table
from ppserve.core.ledger.account import StageTimes
from ppserve.core.ledger.causes import CAUSES

_WIDTH = 50
_LATENCIES = (
    ("Time to First Token", "TTFT", "ttft"),
    ("Time per Output Token (excl. 1st token)", "TPOT", "tpot"),
    ("Inter-token Latency", "ITL", "itl"),
    ("End-to-end Latency", "E2EL", "e2el"),
)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Statistics of one latency, in milliseconds; all zero without observations."""

    mean: float = 0.0
    median: float = 0.0
    p99: float = 0.0

    @classmethod
    def from_seconds(cls, seconds: Sequence[float]) -> Distribution:
        ms = [1e3 * value for value in seconds]
        return cls(statistics.fmean(ms), percentile(ms, 50), percentile(ms, 99)) if ms else cls()


@dataclass(frozen=True, slots=True)
class Summary:
    """One run's figures, by vLLM's names. Throughputs are per second; latencies are of successful requests."""

    served: Served
    max_concurrency: int | None
    """Callers of a closed loop; None in an open loop."""
    request_rate: float
    """Requests per second; infinite in a closed loop."""
    seed: int
    num_prompts: int
    duration: float  # seconds
    completed: int
    failed: int
    errors_by_status: Mapping[str, int]
    problems: Mapping[str, str]  # one message for each status
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    ttft: Distribution
    tpot: Distribution
    itl: Distribution
    e2el: Distribution
    client_cores: float  # cores that the load generator used, on average
    stages: tuple[StageTimes, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the figures as a flat JSON object."""
        flat: dict[str, Any] = {"backend": "ppserve", **asdict(self.served)}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Distribution):
                flat |= {f"{statistic}_{field.name}_ms": ms for statistic, ms in asdict(value).items()}
            elif field.name not in ("served", "problems", "stages"):
                flat[field.name] = "inf" if value == math.inf else value
        flat["stages"] = [
            {"replica": index // self.served.num_stages, "stage": index % self.served.num_stages, **_shares(times)}
            for index, times in enumerate(self.stages)
        ]
        return flat


def summarize(measured: Measurement) -> Summary:
    good = [answer for answer in measured.answers if answer.is_ok]
    bad = [answer for answer in measured.answers if not answer.is_ok]
    input_tokens = sum(len(answer.question.prompt_ids) for answer in good)
    output_tokens = sum(answer.num_tokens for answer in good)
    duration_s = measured.duration_s or math.inf
    load = measured.load
    return Summary(
        served=measured.served,
        max_concurrency=load.concurrency if isinstance(load, ClosedLoop) else None,
        request_rate=math.inf if isinstance(load, ClosedLoop) else load.rate,
        seed=measured.seed,
        num_prompts=len(measured.answers),
        duration=measured.duration_s,
        completed=len(good),
        failed=len(bad),
        errors_by_status=dict(Counter(answer.status for answer in bad).most_common()),
        problems={answer.status: answer.problem for answer in reversed(bad)},
        total_input_tokens=input_tokens,
        total_output_tokens=output_tokens,
        request_throughput=len(good) / duration_s,
        output_throughput=output_tokens / duration_s,
        total_token_throughput=(input_tokens + output_tokens) / duration_s,
        **_latencies(good),
        client_cores=measured.client_cpu_s / duration_s,
        stages=measured.ledger,
    )


def _latencies(good: Sequence[Answer]) -> dict[str, Distribution]:
    with_tokens = [answer for answer in good if answer.arrivals]
    seconds = {
        "ttft": [answer.ttft_s for answer in with_tokens],
        "tpot": [tpot for answer in with_tokens if (tpot := answer.tpot_s) is not None],
        "itl": [gap for answer in with_tokens for gap in answer.itls_s],
        "e2el": [answer.e2e_s for answer in good],
    }
    return {name: Distribution.from_seconds(observed) for name, observed in seconds.items()}


def _shares(times: StageTimes) -> dict[str, Any]:
    """Return a stage's seconds and shares. Busy and bubble are shares of the time with work, idle one of all
    time."""
    return {
        "busy_seconds": times.computed_ns / 1e9,
        "idle_seconds": times.idle_ns / 1e9,
        "bubble_seconds": {cause: ns / 1e9 for cause, ns in times.bubble_ns.items()},
        "busy_share": times.busy_share,
        "idle_share": times.idle_share,
        "bubble_share": times.bubble_share(),
        "bubble_share_by_cause": {cause: times.bubble_share(cause) for cause in CAUSES},
    }


def render_table(summary: Summary) -> str:
    """Return the figures as vLLM's table, whose labels tools parse, and below it the stages' time."""
    lines = [" Serving Benchmark Result ".center(_WIDTH, "=")]
    lines += [_row(label, value) for label, value in _counts(summary)]
    for title, name, attribute in _LATENCIES:
        distribution: Distribution = getattr(summary, attribute)
        lines.append(title.center(_WIDTH, "-"))
        lines.append(_row(f"Mean {name} (ms):", distribution.mean))
        lines.append(_row(f"Median {name} (ms):", distribution.median))
        lines.append(_row(f"P99 {name} (ms):", distribution.p99))
    lines.append("=" * _WIDTH)
    if summary.stages:
        lines += ["", *render_ledger(summary.stages, summary.served.num_replicas)]
    for status, number in summary.errors_by_status.items():
        problem = f"failed with {status}: {summary.problems[status]}"
        lines.append(f"\n{number} of {summary.num_prompts} requests {problem}")
    lines.append(f"\nThis load generator used {summary.client_cores:.2f} cores. Seed {summary.seed}.")
    lines.append(f"\n{conclude(summary)}")
    return "\n".join(lines)


def conclude(summary: Summary) -> str:
    """Return the run in a sentence."""
    answered = f"{summary.completed} of {summary.num_prompts} requests were answered in {summary.duration:.1f} s"
    if not summary.completed:
        return f"{answered}."
    speed = f"{summary.output_throughput:.1f} tokens a second in all"
    first, further = summary.ttft.median, summary.itl.median
    return (
        f"{answered}: {speed}, the first after {first:.0f} ms and a further one every {further:.1f} ms (medians)."
    )


def render_ledger(ledger: tuple[StageTimes, ...], num_replicas: int = 1) -> list[str]:
    """Return a line per stage. Busy and bubble are percents of the time with work, idle is one of all time."""
    rows = [["stage", "busy %", "bubble %", *CAUSES, "idle % (of all time)"]]
    for index, times in enumerate(ledger):
        replica, stage = divmod(index, len(ledger) // num_replicas)
        name = f"{replica}.{stage}" if num_replicas > 1 else str(stage)
        shares = (times.busy_share, times.bubble_share(), *map(times.bubble_share, CAUSES), times.idle_share)
        rows.append([name, *(f"{100 * share:.2f}" for share in shares)])
    return table(*rows)


def _counts(summary: Summary) -> Iterator[tuple[str, float]]:
    yield "Successful requests:", summary.completed
    yield "Failed requests:", summary.failed
    if summary.max_concurrency is not None:
        yield "Maximum request concurrency:", summary.max_concurrency
    if not math.isinf(summary.request_rate):
        yield "Request rate configured (RPS):", summary.request_rate
    yield "Benchmark duration (s):", summary.duration
    yield "Total input tokens:", summary.total_input_tokens
    yield "Total generated tokens:", summary.total_output_tokens
    yield "Request throughput (req/s):", summary.request_throughput
    yield "Output token throughput (tok/s):", summary.output_throughput
    yield "Total token throughput (tok/s):", summary.total_token_throughput


def _row(label: str, value: float) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {text:<10}".rstrip()
