"""How busy the stages are while a closed loop of callers keeps the server full, and what stages gain over one.

    python benchmarks/steady_pipeline.py MODEL_DIR --concurrency 1 32 64 \\
        --serve "--stages 1 --threads 1" --serve "--stages 2 --threads 1"

For each configuration and concurrency: callers ask for a while that is not counted, so that they are out of
step and the server is as full as it will be; then tokens and the stages' ledger are read over a window.
Configurations take turns, each repetition with fresh servers; medians are printed, and throughput as a multiple
of the first configuration's. Beside them, as the limit of what two stages on two cores can gain: what a process
of plain arithmetic on each of two cores does, as a multiple of one alone, measured before every server.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import shlex
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass

from local_server import Address, running

from ppserve.bench.caller import Caller
from ppserve.bench.ledger import between, read_ledger
from ppserve.bench.load import ClosedLoop, Until, Watch, run_load
from ppserve.bench.measure import introduce
from ppserve.bench.scrape import fetch_metrics
from ppserve.bench.workload import Workload, drawn_sizes, parse_lengths
from ppserve.core.ledger.account import StageTimes
from ppserve.core.ledger.causes import CAUSES


@dataclass(frozen=True, slots=True)
class Flags:
    """ramp_s: not counted. window_s: counted."""

    prompt: str
    new: str
    ramp_s: float
    window_s: float


@dataclass(frozen=True, slots=True)
class Window:
    """What was seen over one window."""

    output_tokens_per_s: float
    prompt_tokens_per_s: float
    ledger: tuple[StageTimes, ...]


async def watch_window(address: Address, concurrency: int, flags: Flags, seed: int) -> Window:
    """Callers keep on asking during the ramp and the window; those under way at its end are let go."""
    async with Caller(address.grpc) as caller:
        served = await introduce(caller, address.grpc, address.metrics)
        sizes = drawn_sizes(parse_lengths(flags.prompt), parse_lengths(flags.new))
        workload = Workload(sizes, served.vocab_size, served.max_context, seed)
        load = asyncio.create_task(
            run_load(caller.ask, workload.question, ClosedLoop(concurrency), Until(duration_s=3600.0), Watch())
        )
        try:
            await asyncio.sleep(flags.ramp_s)
            before, counts = read_ledger(await caller.topology()), await _counts(address)
            begun_s = time.perf_counter()
            await asyncio.sleep(flags.window_s)
            after, later = read_ledger(await caller.topology()), await _counts(address)
            ended_s = time.perf_counter()
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
        new, prompt = ((b - a) / (ended_s - begun_s) for a, b in zip(counts, later, strict=True))
        return Window(new, prompt, between(before, after))


async def _counts(address: Address) -> tuple[float, float]:
    reading = await asyncio.to_thread(fetch_metrics, address.metrics)
    return reading.value("ppserve_generated_tokens_total"), reading.value("ppserve_prompt_tokens_total")


def two_cores_over_one(seconds: float = 2.0) -> float:
    """Rounds of plain arithmetic that two processes do at once, over those of one alone."""

    def rounds(num_processes: int) -> int:
        with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
            pool.map(_count_rounds, [0.1] * num_processes)
            return sum(pool.map(_count_rounds, [seconds] * num_processes))

    return rounds(2) / rounds(1)


def _count_rounds(seconds: float) -> int:
    rounds, until_s = 0, time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        sum(range(10_000))
        rounds += 1
    return rounds


def print_row(name: str, concurrency: int, windows: list[Window], base: float | None) -> float:
    """One line of the table; the median throughput."""
    rates = [window.output_tokens_per_s for window in windows]
    median = statistics.median(rates)
    over = f"{median / base:5.2f}" if base else "     "
    print(
        f"{name:<44} {concurrency:>4} {median:8.1f} ({min(rates):.1f}..{max(rates):.1f}) {over}"
        f"  prompt tok/s {statistics.median(w.prompt_tokens_per_s for w in windows):7.1f}"
    )
    for place in range(len(windows[0].ledger)):
        times = [window.ledger[place] for window in windows]
        causes = "  ".join(
            f"{cause} {statistics.median(100 * t.bubble_share(cause) for t in times):.1f}" for cause in CAUSES
        )
        print(
            f"    stage {place}: bubble {statistics.median(100 * t.bubble_share() for t in times):5.2f}%"
            f"  idle {statistics.median(100 * t.idle_share for t in times):5.2f}%   {causes}",
            flush=True,
        )
    return median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="as for `ppserve serve --model`")
    parser.add_argument("--serve", action="append", metavar="FLAGS", required=True)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[32])
    parser.add_argument("--prompt", default="uniform:64:192", help="as for `ppserve bench --prompt-tokens`")
    parser.add_argument("--new", default="uniform:32:96")
    parser.add_argument("--ramp", type=float, default=15.0, metavar="SECONDS")
    parser.add_argument("--window", type=float, default=20.0, metavar="SECONDS")
    parser.add_argument("--repetitions", type=int, default=1)
    given = parser.parse_args()
    flags = Flags(given.prompt, given.new, given.ramp, given.window)
    seen: dict[tuple[str, int], list[Window]] = defaultdict(list)
    limits: list[float] = []
    for repetition in range(given.repetitions):
        for configuration in given.serve:
            limits.append(two_cores_over_one())
            for concurrency in given.concurrency:
                with running(["--model", given.model, *shlex.split(configuration)]) as address:
                    seed = 1000 * repetition + concurrency
                    window = asyncio.run(watch_window(address, concurrency, flags, seed))
                seen[configuration, concurrency].append(window)
    print(f"two processes over one, plain arithmetic: {', '.join(f'{limit:.2f}' for limit in limits)}")
    base: dict[int, float] = {}
    for concurrency in given.concurrency:
        for configuration in given.serve:
            windows = seen[configuration, concurrency]
            rate = print_row(configuration, concurrency, windows, base.get(concurrency))
            base.setdefault(concurrency, rate)


if __name__ == "__main__":
    main()
