"""Figures as people and programs read them: a table, JSON, CSV."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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
_LATE_MS = 1.0


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
    if summary.server:
        lines.append("Seen by the Server".center(_WIDTH, "-"))
        lines += [_row(f"{name}:", value) for name, value in summary.server.items()]
    lines.append("=" * _WIDTH)
    if summary.stages:
        lines += ["", *render_ledger(summary.stages, summary.setting.num_replicas)]
    return "\n".join([*lines, *_remarks(summary)])


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


def render_sweep(summaries: Sequence[Summary]) -> str:
    """One line per concurrency."""
    heads = ("req/s", "tok/s", "mean TTFT", "P99 TTFT", "mean ITL", "P99 ITL")
    rows = [["concurrency", *heads, "failed", "worst bubble %"]]
    for one in summaries:
        latencies = (one.ttft.mean, one.ttft.p99, one.itl.mean, one.itl.p99)
        figures = (one.request_throughput, one.output_throughput, *latencies)
        bubble = max((times.bubble_share() for times in one.stages), default=0.0)
        concurrency = str(one.setting.max_concurrency or 0)
        rows.append([concurrency, *(f"{n:.2f}" for n in figures), str(one.failed), f"{100 * bubble:.2f}"])
    return "\n".join(table(*rows))


def write_json(path: Path, summaries: Sequence[Summary], extra: Sequence[dict[str, Any]] | None = None) -> None:
    """One object for one run, a list for a sweep. extra: more entries for each. Raises OSError."""
    more = extra or [{} for _ in summaries]
    runs = [{**one.to_json(), **fields} for one, fields in zip(summaries, more, strict=True)]
    path.write_text(json.dumps(runs[0] if len(runs) == 1 else runs, indent=2) + "\n")


def write_csv(path: Path, summaries: Sequence[Summary]) -> None:
    """One row per run; stages as columns such as stage0_bubble_host. Raises OSError."""
    rows = [dict(_flat(one.to_json())) for one in summaries]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)


def _counts(summary: Summary) -> Iterator[tuple[str, float | str]]:
    setting = summary.setting
    yield "Successful requests:", summary.completed
    yield "Failed requests:", summary.failed
    if setting.max_concurrency is not None:
        yield "Maximum request concurrency:", setting.max_concurrency
    if not math.isinf(setting.request_rate):
        yield "Request rate configured (RPS):", setting.request_rate
    yield "Benchmark duration (s):", summary.duration
    yield "Total input tokens:", summary.total_input_tokens
    yield "Total generated tokens:", summary.total_output_tokens
    yield "Request throughput (req/s):", summary.request_throughput
    if summary.request_goodput is not None:
        yield "Request goodput (req/s):", summary.request_goodput
    yield "Output token throughput (tok/s):", summary.output_throughput
    yield "Peak output token throughput (tok/s):", summary.max_output_tokens_per_s
    yield "Peak concurrent requests:", float(summary.max_concurrent_requests)
    yield "Total token throughput (tok/s):", summary.total_token_throughput


def _row(label: str, value: float | str) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {text:<10}".rstrip()


def _remarks(summary: Summary) -> Iterator[str]:
    """What a reader must know to judge the figures: failures, clipped requests, delays of the load generator."""
    total = summary.num_prompts
    if summary.clipped:
        yield f"\n{summary.clipped} of {total} requests were longer than the context and clipped to it."
    for status, number in summary.errors_by_status.items():
        yield f"\n{number} of {total} requests failed with {status}: {summary.problems[status]}"
    if summary.start_delay.p99 > _LATE_MS:
        yield (
            f"\nRequests waited here before they were sent: mean {summary.start_delay.mean:.1f} ms,"
            f" p99 {summary.start_delay.p99:.1f} ms. Their latencies count it."
        )
    yield f"\nThis load generator used {summary.client_cores:.2f} cores. Seed {summary.setting.seed}."


def _flat(fields: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if name == "stages":
            for stage in value:
                prefix = f"stage{stage['stage']}"
                if fields["num_replicas"] > 1:
                    prefix = f"replica{stage['replica']}_{prefix}"
                yield f"{prefix}_busy", stage["busy_share"]
                yield f"{prefix}_idle", stage["idle_share"]
                for cause, share in stage["bubble_share_by_cause"].items():
                    yield f"{prefix}_bubble_{cause}", share
        elif name == "errors_by_status":
            yield name, " ".join(f"{status}:{number}" for status, number in value.items())
        elif isinstance(value, dict):
            yield from ((f"{name}_{key}", inner) for key, inner in value.items())
        else:
            yield name, value
