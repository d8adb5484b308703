"""Output tokens per second for one fixed workload: configurations of this server, or two checkouts, by turns.

    python benchmarks/throughput.py [--model MODEL_DIR]
    python benchmarks/throughput.py --serve "--stages 1 --threads 2" --serve "--stages 2 --threads 1"
    python benchmarks/throughput.py --against OTHER_CHECKOUT [--cells 'int8:*:16'] [--rounds 3]

Random prompts of 128 tokens, 64 new tokens each, greedy, end-of-text ignored, prefill included, over gRPC, with
the load generator on the same machine. Every run has prompts of its own, which no prefix cache knows. Run it on an
otherwise idle machine, and compare only figures of one run. Without --model a random GPT-2 124M is made.

Without --against: 16 requests at once, every configuration with a fresh server in each round; medians are printed.
With --against: this checkout beside another one, in cells of dtype, stages and callers. Both servers run; the load
goes to one after the other, so that both meet the same machine. A ratio is new/old in one round; the table has
medians of rounds. `start` compares seconds to the ready line; a first start may compile kernels.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from itertools import groupby, product
from pathlib import Path

import click
from local_server import THIS_TREE, Address, model_or_random, running

from ppserve.bench.caller import Caller
from ppserve.bench.measure import ClosedLoop, Lengths, Served, Until, Workload, introduce, measure, warm_up
from ppserve.bench.summary import Summary, render_ledger, summarize
from ppserve.core.ledger.account import StageTimes

TWO_CORES = ("--stages 1 --threads 1", "--stages 1 --threads 2", "--stages 2 --threads 1")
DTYPES = {
    "float32": "--dtype float32",
    "bfloat16": "--dtype bfloat16",
    "int8": "--dtype bfloat16 --quantization int8",
}
STAGES = {1: "--stages 1 --threads 2", 2: "--stages 2 --threads 1"}
CALLERS = (1, 16, 64)
LEAST_REQUESTS = 4
# A server that has just started still takes memory and frees what loading needed.
SETTLE_S = 3.0
OLD, NEW = "old", "new"


@dataclass(frozen=True, slots=True)
class Shape:
    """The workload: so many requests at once, and their lengths in tokens."""

    num_requests: int
    prompt_tokens: int
    new_tokens: int

    def workload(self, served: Served, seed: int) -> Workload:
        prompt, new = (Lengths(count, count) for count in (self.prompt_tokens, self.new_tokens))
        return Workload(prompt, new, served.vocab_size, seed)


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
    at_once = shape.num_requests
    async with Caller(target) as caller:
        served = await introduce(caller, target)
        await warm_up(caller, shape.workload(served, seed), at_once, at_once)
        prompts_alone = Shape(at_once, shape.prompt_tokens, 1).workload(served, 2 * seed + 1)
        prefill = await timed(caller, served, prompts_alone, at_once, at_once)
        whole = await timed(caller, served, shape.workload(served, 2 * seed + 2), at_once, at_once)
    return Run(served, prefill.duration, whole.duration, whole.output_throughput, whole.client_cores, whole.stages)


async def timed(caller: Caller, served: Served, workload: Workload, callers: int, num_requests: int) -> Summary:
    """A closed loop of so many callers and requests. Exits if a request fails."""
    summary = summarize(await measure(caller, served, workload, ClosedLoop(callers), Until(num_requests)))
    if summary.failed:
        raise SystemExit(f"{summary.failed} requests failed: {dict(summary.problems)}")
    return summary


# ---- two checkouts ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """What one ratio is measured for."""

    dtype: str
    stages: int
    callers: int

    def __str__(self) -> str:
        return f"{self.dtype}:{self.stages}:{self.callers}"

    def server_flags(self, model: str, kv_mib: int) -> list[str]:
        memory = f"--kv-cache-memory={kv_mib // self.stages}M"
        # Without draft tokens: what a random model repeats would be measured instead of its steps.
        flags = f"{DTYPES[self.dtype]} {STAGES[self.stages]} --force-cpu --speculate off {memory}"
        return ["--model", model, *shlex.split(flags)]


@dataclass(frozen=True, slots=True)
class Pair:
    """One round's figures of both checkouts: tokens per second of a cell, or seconds to the ready line."""

    name: str
    old: float
    new: float

    @property
    def ratio(self) -> float:
        return self.new / self.old


def select_cells(patterns: Sequence[str]) -> list[Cell]:
    """The cells that one of the patterns matches, those of one server beside each other."""
    cells = [Cell(*parts) for parts in product(DTYPES, STAGES, CALLERS)]
    return [cell for cell in cells if any(fnmatch(str(cell), pattern) for pattern in patterns)]


def compare(model: str, old_tree: Path, cells: Sequence[Cell], rounds: int, kv_mib: int) -> Iterator[Pair]:
    trees = {OLD: old_tree, NEW: THIS_TREE}
    for number in range(rounds):
        order = (OLD, NEW) if number % 2 == 0 else (NEW, OLD)
        for (dtype, stages), group in groupby(cells, lambda cell: (cell.dtype, cell.stages)):
            of_server = list(group)
            flags = of_server[0].server_flags(model, kv_mib)
            with ExitStack() as stack:
                servers = {name: stack.enter_context(running(flags, trees[name])) for name in order}
                yield Pair(f"start {dtype}:{stages}", servers[OLD].ready_s, servers[NEW].ready_s)
                yield from asyncio.run(_compare_servers(servers, of_server, number))


async def _compare_servers(servers: dict[str, Address], cells: Iterable[Cell], number: int) -> list[Pair]:
    pairs = []
    async with Caller(servers[OLD].grpc) as old, Caller(servers[NEW].grpc) as new:
        callers = {OLD: old, NEW: new}
        served = {name: await introduce(callers[name], servers[name].grpc) for name in servers}
        for name in servers:
            await warm_up(callers[name], Shape(8, 128, 32).workload(served[name], number), 8, 8)
        await asyncio.sleep(SETTLE_S)
        for place, cell in enumerate(cells):
            shape = Shape(max(LEAST_REQUESTS, cell.callers), 128, 64)
            rates = {}
            for name in servers if place % 2 == 0 else reversed(servers):
                workload = shape.workload(served[name], 100 * (number + 1) + place)
                summary = await timed(callers[name], served[name], workload, cell.callers, shape.num_requests)
                rates[name] = summary.output_throughput
            pairs.append(Pair(str(cell), rates[OLD], rates[NEW]))
    return pairs


def comparison_table(pairs: Sequence[Pair]) -> str:
    """Markdown: one row for each cell and each kind of start. Of starts, a ratio below 1 is the better one."""
    by_name: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        by_name[pair.name].append(pair)
    lines = ["| dtype:stages:callers | old | new | new/old, median (least to most) |", "|---|---|---|---|"]
    for name, found in by_name.items():
        old, new = (statistics.median(figures) for figures in ([p.old for p in found], [p.new for p in found]))
        ratios = [pair.ratio for pair in found]
        unit = "s" if name.startswith("start") else "tok/s"
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        lines.append(f"| {name} | {old:.1f} {unit} | {new:.1f} {unit} | {spread} |")
    return "\n".join(lines)


# ---- configurations --------------------------------------------------------------------------------------


def configuration_line(flags: str, shape: Shape, runs: list[Run]) -> str:
    """One configuration in one line; figures are medians."""
    rates = [run.tokens_per_s for run in runs]
    return (
        f"PEER ppserve {runs[0].served.dtype} {flags}: batch={shape.num_requests}"
        f" prompt={shape.prompt_tokens} new={shape.new_tokens}"
        f" prefill_s={statistics.median(run.prefill_s for run in runs):.2f}"
        f" total_s={statistics.median(run.total_s for run in runs):.2f}"
        f" output_tok_per_s={statistics.median(rates):.1f} min={min(rates):.1f} max={max(rates):.1f}"
        f" runs={len(runs)} client_cores={statistics.median(run.client_cores for run in runs):.2f}"
    )


def time_configurations(model: str, configurations: Sequence[str], shape: Shape, rounds: int) -> None:
    runs: dict[str, list[Run]] = defaultdict(list)
    for number in range(rounds):
        for configuration in configurations:
            with running(["--model", model, *shlex.split(configuration)]) as address:
                runs[configuration].append(asyncio.run(run_once(address.grpc, shape, number)))
    for configuration in configurations:
        print(configuration_line(configuration, shape, runs[configuration]))
        print("\n".join(render_ledger(runs[configuration][-1].ledger)), flush=True)


@click.command(help=__doc__)
@click.option("--model", help="As for `ppserve serve --model`.")
@click.option("--serve", "configurations", multiple=True, default=TWO_CORES, help="One configuration's flags.")
@click.option("--against", type=click.Path(path_type=Path, exists=True, file_okay=False, resolve_path=True))
@click.option("--cells", default="*", help="With --against: patterns of dtype:stages:callers, with commas.")
@click.option("--rounds", default=3)
@click.option("--requests", default=16, help="Without --against: all at once.")
@click.option("--kv-cache-mib", default=1024, help="With --against: of all stages of each server.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="With --against.")
def main(
    model: str | None, configurations: tuple[str, ...], against: Path | None, cells: str, rounds: int,
    requests: int, kv_cache_mib: int, json_file: Path | None,
) -> None:  # fmt: skip
    pairs = []
    with model_or_random(model) as path:
        if against is None:
            time_configurations(path, configurations, Shape(requests, 128, 64), rounds)
            return
        for pair in compare(path, against, select_cells(cells.split(",")), rounds, kv_cache_mib):
            load = os.getloadavg()[0]
            print(f"{pair.name:18} {pair.old:8.1f} {pair.new:8.1f}  {pair.ratio:.3f}  load {load:.1f}", flush=True)
            pairs.append(pair)
    print("\n" + comparison_table(pairs))
    if json_file is not None:
        json_file.write_text(json.dumps([{**asdict(pair), "ratio": pair.ratio} for pair in pairs], indent=1))


if __name__ == "__main__":
    main()
