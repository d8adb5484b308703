"""Goodput under recorded traffic: this server as it comes, against the same server with naive settings.

    python benchmarks/goodput_replay.py MODEL_DIR --trace ../shared/data/azure_llm_conv_2023.csv

First the capacity: requests per second of the default server, asked for the trace's lengths (clipped to the
context) by many callers at once. Then the trace is replayed with its arrivals scaled so that they come at 80% of
that, to both servers in turn, each started fresh. Latency counts from when a request was due. Naive means one
microbatch, prompts in one piece, and the same number of blocks on every stage.

Run it on an otherwise idle machine, and compare only figures of one run.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import re
import shlex
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from operator import itemgetter
from pathlib import Path

from local_server import running

from ppserve.bench.caller import Answer, Caller
from ppserve.bench.load import ClosedLoop, Load, OpenLoop, Until
from ppserve.bench.measure import introduce, measure, warm_up
from ppserve.bench.report import render_ledger
from ppserve.bench.summary import Summary, summarize
from ppserve.bench.workload import Workload
from ppserve.errors import ConfigError

WARM_UP = 8
HUGE_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request. at_s: seconds after the first."""

    at_s: float
    prompt_tokens: int
    new_tokens: int


def read_trace(path: Path, num_requests: int | None = None, time_scale: float = 1.0) -> tuple[TraceRow, ...]:
    """The first requests of a CSV with the columns TIMESTAMP, ContextTokens and GeneratedTokens, by their times.

    time_scale: 2.0 = twice as fast as recorded. Raises ConfigError naming the line and the column.
    """
    rows: list[tuple[datetime, int, int]] = []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            table = csv.DictReader(file)
            if missing := {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} - set(table.fieldnames or ()):
                raise ConfigError("--trace", f"{path} has no column {min(missing)}")
            for number, row in enumerate(table, start=2):
                if len(rows) == num_requests:
                    break
                try:
                    at = _time(row)
                    if rows and (at.tzinfo is None) != (rows[0][0].tzinfo is None):
                        raise ValueError("TIMESTAMP: some have a time zone, and others have none")
                    rows.append((at, _tokens(row, "ContextTokens"), _tokens(row, "GeneratedTokens")))
                except ValueError as error:
                    raise ConfigError("--trace", f"{path}:{number}: {error}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError("--trace", f"cannot read {path}: {error}") from None
    if not rows:
        raise ConfigError("--trace", f"{path} holds no requests")
    rows.sort(key=itemgetter(0))
    first = rows[0][0]
    return tuple(TraceRow((at - first).total_seconds() / time_scale, prompt, new) for at, prompt, new in rows)


def _time(row: dict[str, str]) -> datetime:
    said = row["TIMESTAMP"]
    try:
        return datetime.fromisoformat(said)
    except (TypeError, ValueError):
        raise ValueError(f"TIMESTAMP: {said!r} is not a time such as 2023-11-16 18:15:46") from None


def _tokens(row: dict[str, str], column: str) -> int:
    """At least one: some traces have answers without tokens."""
    said = row[column]
    if said is None or not re.fullmatch(r"\s*\d{1,9}\s*", said):
        raise ValueError(f"{column}: {said!r} is not a number of tokens")
    return max(1, int(said))


def clip(prompt_tokens: int, new_tokens: int, max_context: int) -> tuple[int, int]:
    """Lengths that fit the context together: the answer keeps up to half of it, the prompt what is left.

    The prompt is cut first because the number of generated tokens decides most of the load.
    """
    new = max(1, min(new_tokens, max_context // 2)) if prompt_tokens + new_tokens > max_context else new_tokens
    return max(1, min(prompt_tokens, max_context - new)), new


@dataclass(frozen=True, slots=True)
class Replay:
    """What is replayed, at what share of the capacity, and what a good request is (milliseconds)."""

    rows: tuple[TraceRow, ...]
    objectives: Mapping[str, float]
    seed: int

    def at_rate(self, rate: float) -> Replay:
        """The same rows with their arrivals stretched to so many requests a second."""
        factor = (len(self.rows) - 1) / rate / self.rows[-1].at_s
        return replace(self, rows=tuple(replace(row, at_s=row.at_s * factor) for row in self.rows))


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run's figures. goodput: requests a second that kept all objectives."""

    summary: Summary
    goodput: float


def keeps(answer: Answer, objectives: Mapping[str, float]) -> bool:
    """objectives: milliseconds by name. An answer of one token has no time between tokens: it keeps each limit."""
    if not answer.is_ok or not answer.arrivals:
        return False
    took_s = {"ttft": answer.ttft_s, "tpot": answer.tpot_s or 0.0, "e2el": answer.e2e_s}
    return all(1e3 * took_s[name] <= limit for name, limit in objectives.items())


async def run(target: str, replay: Replay, load: Load) -> Outcome:
    """One run against a running server."""
    async with Caller(target) as caller:
        served = await introduce(caller, target)
        sizes = [clip(row.prompt_tokens, row.new_tokens, served.max_context) for row in replay.rows]
        workload = Workload(lambda number, rng: sizes[number % len(sizes)], served.vocab_size, replay.seed)
        await warm_up(caller, workload, WARM_UP, WARM_UP)
        measured = await measure(caller, served, workload, load, Until(len(replay.rows)))
        num_kept = sum(keeps(answer, replay.objectives) for answer in measured.answers)
        return Outcome(summarize(measured), num_kept / measured.duration_s)


def even_split(model: str, num_stages: int) -> str:
    """The same number of blocks everywhere, as far as it goes."""
    from ppserve.model.checkpoint.opening import read_architecture

    num_layers = read_architecture(model).num_layers
    more = num_layers % num_stages
    return ",".join(str(num_layers // num_stages + (stage < more)) for stage in range(num_stages))


def show(name: str, runs: list[Outcome]) -> None:
    """Medians over the repetitions, and the bubbles of the last."""

    def median(figure: str, statistic: str) -> float:
        values: list[float] = [getattr(getattr(one.summary, figure), statistic) for one in runs]
        return statistics.median(values)

    goodput = statistics.median(one.goodput for one in runs)
    throughput = statistics.median(one.summary.output_throughput for one in runs)
    print(
        f"{name:8} goodput={goodput:.3f} req/s  throughput={throughput:.1f} tok/s"
        f"  TTFT mean={median('ttft', 'mean'):.0f} p50={median('ttft', 'median'):.0f}"
        f" p99={median('ttft', 'p99'):.0f} ms"
        f"  ITL mean={median('itl', 'mean'):.1f} p99={median('itl', 'p99'):.1f} ms"
        f"  TPOT p50={median('tpot', 'median'):.1f} p99={median('tpot', 'p99'):.1f} ms"
        f"  failed={sum(one.summary.failed for one in runs)} runs={len(runs)}"
    )
    print("\n".join(render_ledger(runs[-1].summary.stages)), flush=True)


def main() -> None:
    flags = _flags()
    objectives = {name: float(limit) for name, limit in (text.split(":") for text in flags.goodput)}
    replay = Replay(read_trace(flags.trace, flags.requests), objectives, seed=1)
    common = ["--model", flags.model, "--stages", str(flags.stages), *shlex.split(flags.serve)]
    naive = ["--microbatches", "1", "--prefill-chunk", str(HUGE_CHUNK)]
    naive += ["--layers", even_split(flags.model, flags.stages)]
    with running(common) as address:
        closed = asyncio.run(run(address.grpc, replay, ClosedLoop(flags.callers))).summary
    capacity = flags.capacity or closed.request_throughput
    print(
        f"capacity {closed.request_throughput:.3f} req/s ({closed.output_throughput:.1f} tok/s) with"
        f" {flags.callers} callers; {len(replay.rows)} requests, clipped to the context;"
        f" replayed at {flags.load * capacity:.3f} req/s; good: {' '.join(flags.goodput)} ms",
        flush=True,
    )
    offered = replay.at_rate(flags.load * capacity)
    runs: dict[str, list[Outcome]] = {"default": [], "naive": []}
    for repetition in range(flags.repetitions):
        for name, extra in (("default", []), ("naive", naive)):
            with running([*common, *extra]) as address:
                load = OpenLoop([row.at_s for row in offered.rows], flags.load * capacity)
                own = replace(offered, seed=2 + repetition)  # the same prompts for both
                runs[name].append(asyncio.run(run(address.grpc, own, load)))
    for name, found in runs.items():
        show(name, found)
    good, bad = (statistics.median(one.goodput for one in found) for found in runs.values())
    print(f"goodput ratio {good / bad:.2f}" if bad else "goodput ratio: the naive server keeps no objective")
    if flags.json:
        every = [closed, *(one.summary for name in runs for one in runs[name])]
        flags.json.write_text(json.dumps([summary.to_json() for summary in every], indent=1))


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="as for `ppserve serve --model`")
    parser.add_argument("--trace", type=Path, required=True, help="TIMESTAMP, ContextTokens, GeneratedTokens")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--serve", default="", metavar="FLAGS", help="more flags for both servers")
    parser.add_argument("--requests", type=int, default=200, help="so many of the trace's first")
    parser.add_argument("--callers", type=int, default=32, help="for the capacity")
    parser.add_argument("--capacity", type=float, help="requests per second, instead of measuring it")
    parser.add_argument("--load", type=float, default=0.8, help="share of the capacity")
    parser.add_argument("--goodput", nargs="+", default=["ttft:2000", "tpot:200"], metavar="NAME:MS")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
