"""Output tokens per second for one fixed workload, beside other configurations of this server.

    python benchmarks/throughput.py MODEL_DIR
    python benchmarks/throughput.py MODEL_DIR --serve "--stages 1 --threads 2" --serve "--stages 2 --threads 1"

16 requests at once, 128 random prompt tokens each, 64 new tokens, greedy, end-of-text ignored, prefill included,
through the real gRPC server with the load generator on the same machine. Configurations take turns, each with a
fresh server and after warming up; medians are printed. Every run has prompts of its own, or the prefix cache would
answer. Run it on an otherwise idle machine, and compare only figures of one run.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import statistics
from dataclasses import dataclass

from local_server import running

from ppserve.bench.caller import Caller
from ppserve.bench.load import ClosedLoop, Until, Watch
from ppserve.bench.measure import Served, introduce, measure, warm_up
from ppserve.bench.report import render_ledger
from ppserve.bench.summary import Summary, summarize
from ppserve.bench.workload import Workload, drawn_sizes
from ppserve.core.ledger.account import StageTimes

TWO_CORES = ("--stages 1 --threads 1", "--stages 1 --threads 2", "--stages 2 --threads 1")


@dataclass(frozen=True, slots=True)
class Shape:
    """The workload: so many requests at once, and their lengths in tokens."""

    num_requests: int
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one configuration. prefill_s: the same requests with one new token each; total_s: all of it."""

    served: Served
    prefill_s: float
    total_s: float
    tokens_per_s: float
    client_cores: float
    ledger: tuple[StageTimes, ...]


async def run_once(target: str, shape: Shape, seed: int) -> Run:
    """Warm up, then time the prompts alone, then the whole."""
    async with Caller(target) as caller:
        served = await introduce(caller, target, None)
        warming = _workload(served, shape, shape.new_tokens, seed)
        await warm_up(caller, warming, shape.num_requests, shape.num_requests)
        prefill = await _timed(caller, served, _workload(served, shape, 1, 2 * seed + 1), shape)
        whole = await _timed(caller, served, _workload(served, shape, shape.new_tokens, 2 * seed + 2), shape)
    return Run(served, prefill.duration, whole.duration, whole.output_throughput, whole.client_cores, whole.stages)


def _workload(served: Served, shape: Shape, new_tokens: int, seed: int) -> Workload:
    sizes = drawn_sizes(lambda _: shape.prompt_tokens, lambda _: new_tokens)
    return Workload(sizes, served.vocab_size, served.max_context, seed)


async def _timed(caller: Caller, served: Served, workload: Workload, shape: Shape) -> Summary:
    served = served.under(shape.num_requests, float("inf"), workload.seed)
    load, until = ClosedLoop(shape.num_requests), Until(shape.num_requests)
    summary = summarize(await measure(caller, served, workload, load, until, Watch()))
    if summary.failed:
        raise SystemExit(f"{summary.failed} requests failed: {dict(summary.problems)}")
    return summary


def line(flags: str, shape: Shape, runs: list[Run]) -> str:
    """One configuration in one line; figures are medians."""
    served = runs[0].served
    rates = [run.tokens_per_s for run in runs]
    return (
        f"PEER ppserve {served.setting.dtype} {' '.join(_named(flags, served))} batch={shape.num_requests}"
        f" prompt={shape.prompt_tokens} new={shape.new_tokens}"
        f" prefill_s={statistics.median(run.prefill_s for run in runs):.2f}"
        f" total_s={statistics.median(run.total_s for run in runs):.2f}"
        f" output_tok_per_s={statistics.median(rates):.1f}"
        f" min={min(rates):.1f} max={max(rates):.1f} runs={len(runs)}"
        f" client_cores={statistics.median(run.client_cores for run in runs):.2f}"
    )


def _named(flags: str, served: Served) -> list[str]:
    """`--threads 1 --force-cpu` as threads=1 force-cpu."""
    words = shlex.split(flags)
    named = [f"stages={served.setting.num_stages}"]
    for place, word in enumerate(words):
        if word.startswith("--") and word not in ("--stages", "--dtype"):
            has_value = place + 1 < len(words) and not words[place + 1].startswith("--")
            named.append(word[2:] + (f"={words[place + 1]}" if has_value else ""))
    return named


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="as for `ppserve serve --model`")
    parser.add_argument("--serve", action="append", metavar="FLAGS", help="one configuration; may be repeated")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--requests", type=int, default=16, help="all at once")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--bubbles", action="store_true", help="where the stages' time went, of each last run")
    flags = parser.parse_args()
    shape = Shape(flags.requests, flags.prompt, flags.new)
    configurations: list[str] = flags.serve or list(TWO_CORES)
    runs: dict[str, list[Run]] = {configuration: [] for configuration in configurations}
    for repetition in range(flags.repetitions):
        for configuration in configurations:
            with running(["--model", flags.model, *shlex.split(configuration)]) as address:
                runs[configuration].append(asyncio.run(run_once(address.grpc, shape, repetition)))
    for configuration in configurations:
        print(line(configuration, shape, runs[configuration]), flush=True)
        if flags.bubbles:
            print("\n".join(render_ledger(runs[configuration][-1].ledger)), flush=True)


if __name__ == "__main__":
    main()
