"""Figures as people and programs read them: a table, and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

from ppserve.bench.summary import Distribution, Summary
from ppserve.core.figures import table
from ppserve.core.ledger.account import StageTimes
from ppserve.core.ledger.causes import CAUSES

_WIDTH = 50
_LATENCIES = (
    ("Time to First Token", "TTFT", "ttft"),
    ("Time per Output Token (excl. 1st token)", "TPOT", "tpot"),
    ("Inter-token Latency", "ITL", "itl"),
    ("End-to-end Latency", "E2EL", "e2el"),
)


def render_table(summary: Summary) -> str:
    """The table of vLLM's serving benchmark with its labels, which tools parse; then the stages' time."""
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
        lines.append(
            f"\n{number} of {summary.num_prompts} requests failed with {status}: {summary.problems[status]}"
        )
    lines.append(f"\nThis load generator used {summary.client_cores:.2f} cores. Seed {summary.seed}.")
    return "\n".join(lines)


def render_ledger(ledger: tuple[StageTimes, ...], num_replicas: int = 1) -> list[str]:
    """One line per stage: busy and bubble in percent of the time with work, idle in percent of all time. Stages of
    several replicas, one after the other, are numbered as replica and stage, `1.0`."""
    rows = [["stage", "busy %", "bubble %", *CAUSES, "idle % (of all time)"]]
    for index, times in enumerate(ledger):
        replica, stage = divmod(index, len(ledger) // num_replicas)
        name = f"{replica}.{stage}" if num_replicas > 1 else str(stage)
        shares = (times.busy_share, times.bubble_share(), *map(times.bubble_share, CAUSES), times.idle_share)
        rows.append([name, *(f"{100 * share:.2f}" for share in shares)])
    return table(*rows)


def write_json(path: Path, summary: Summary) -> None:
    """Raises OSError."""
    path.write_text(json.dumps(summary.to_json(), indent=2) + "\n")


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
