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
import shlex
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from local_server import running

from ppserve.bench.caller import Caller
from ppserve.bench.load import ClosedLoop, Load, OpenLoop, Until, Watch
from ppserve.bench.measure import introduce, measure, warm_up
from ppserve.bench.report import render_ledger, write_json
from ppserve.bench.summary import Summary, parse_objectives, summarize
from ppserve.bench.workload import TraceRow, Workload, read_trace, recorded_sizes

WARM_UP = 8
HUGE_CHUNK = 1 << 20


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


async def run(target: str, replay: Replay, load: Load) -> Summary:
    """One run against a running server."""
    async with Caller(target) as caller:
        served = await introduce(caller, target, None)
        workload = Workload(recorded_sizes(replay.rows), served.vocab_size, served.max_context, replay.seed)
        await warm_up(caller, workload, WARM_UP, WARM_UP)
        concurrency = load.concurrency if isinstance(load, ClosedLoop) else None
        span_s = replay.rows[-1].at_s
        rate = float("inf") if concurrency else (len(replay.rows) - 1) / span_s
        served = served.under(concurrency, rate, replay.seed)
        until = Until(len(replay.rows))
        return summarize(await measure(caller, served, workload, load, until, Watch()), replay.objectives)


def even_split(model: str, num_stages: int) -> str:
    """The same number of blocks everywhere, as far as it goes."""
    from ppserve.model.checkpoint.opening import read_architecture

    num_layers = read_architecture(model).num_layers
    more = num_layers % num_stages
    return ",".join(str(num_layers // num_stages + (stage < more)) for stage in range(num_stages))


def show(name: str, runs: list[Summary]) -> None:
    """Medians over the repetitions, and the bubbles of the last."""

    def median(figure: str, statistic: str) -> float:
        values: list[float] = [getattr(getattr(one, figure), statistic) for one in runs]
        return statistics.median(values)

    goodput = statistics.median(one.request_goodput or 0.0 for one in runs)
    throughput = statistics.median(one.output_throughput for one in runs)
    print(
        f"{name:8} goodput={goodput:.3f} req/s  throughput={throughput:.1f} tok/s"
        f"  TTFT mean={median('ttft', 'mean'):.0f} p50={median('ttft', 'median'):.0f}"
        f" p99={median('ttft', 'p99'):.0f} ms"
        f"  ITL mean={median('itl', 'mean'):.1f} p99={median('itl', 'p99'):.1f} ms"
        f"  TPOT p50={median('tpot', 'median'):.1f} p99={median('tpot', 'p99'):.1f} ms"
        f"  failed={sum(one.failed for one in runs)} runs={len(runs)}"
    )
    print("\n".join(render_ledger(runs[-1].stages)), flush=True)


def main() -> None:
    flags = _flags()
    replay = Replay(read_trace(flags.trace, flags.requests), parse_objectives(flags.goodput), seed=1)
    common = ["--model", flags.model, "--stages", str(flags.stages), *shlex.split(flags.serve)]
    naive = ["--microbatches", "1", "--prefill-chunk", str(HUGE_CHUNK)]
    naive += ["--layers", even_split(flags.model, flags.stages)]
    with running(common) as address:
        closed = asyncio.run(run(address.grpc, replay, ClosedLoop(flags.callers)))
    capacity = flags.capacity or closed.request_throughput
    print(
        f"capacity {closed.request_throughput:.3f} req/s ({closed.output_throughput:.1f} tok/s) with"
        f" {flags.callers} callers; {closed.clipped} of {len(replay.rows)} requests clipped to the context;"
        f" replayed at {flags.load * capacity:.3f} req/s; good: {' '.join(flags.goodput)} ms",
        flush=True,
    )
    offered = replay.at_rate(flags.load * capacity)
    runs: dict[str, list[Summary]] = {"default": [], "naive": []}
    for repetition in range(flags.repetitions):
        for name, extra in (("default", []), ("naive", naive)):
            with running([*common, *extra]) as address:
                load = OpenLoop([row.at_s for row in offered.rows])
                own = replace(offered, seed=2 + repetition)  # the same prompts for both
                runs[name].append(asyncio.run(run(address.grpc, own, load)))
    for name, found in runs.items():
        show(name, found)
    good, bad = (statistics.median(one.request_goodput or 0.0 for one in found) for found in runs.values())
    print(f"goodput ratio {good / bad:.2f}" if bad else "goodput ratio: the naive server keeps no objective")
    if flags.json:
        write_json(flags.json, [closed, *runs["default"], *runs["naive"]])


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
