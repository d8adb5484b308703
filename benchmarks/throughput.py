"""Output tokens per second of this checkout beside another one, by turns.

    python benchmarks/throughput.py --against OTHER_CHECKOUT [--model DIR] [--cells 'int8:*:16'] [--rounds 3]

Random prompts of 128 tokens, 64 new tokens each, greedy, end-of-text ignored, prefill included, over gRPC, with
the load generator on the same machine. Every run has prompts of its own, which no prefix cache knows. Without
--model a random GPT-2 124M is made. A cell is a dtype, a number of stages and a number of callers. Both servers
run; the load goes to one after the other, so that both meet the same machine. A ratio is new/old in one round; the
table has medians of rounds. `start` compares seconds to the ready line; a first start may compile kernels.
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
from ppserve.bench.summary import Summary, summarize

DTYPES = {
    "float32": "--dtype float32",
    "bfloat16": "--dtype bfloat16",
    "int8": "--dtype bfloat16 --quantization int8",
    "int4": "--dtype bfloat16 --quantization int4",
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


async def timed(caller: Caller, served: Served, workload: Workload, callers: int, num_requests: int) -> Summary:
    """A closed loop of so many callers and requests. Exits if a request fails."""
    summary = summarize(await measure(caller, served, workload, ClosedLoop(callers), Until(num_requests)))
    if summary.failed:
        raise SystemExit(f"{summary.failed} requests failed: {dict(summary.problems)}")
    return summary


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


@click.command(help=__doc__)
@click.option("--against", required=True, type=click.Path(path_type=Path, exists=True, resolve_path=True))
@click.option("--model", help="As for `ppserve serve --model`.")
@click.option("--cells", default="*", help="Patterns of dtype:stages:callers, with commas.")
@click.option("--rounds", default=3)
@click.option("--kv-cache-mib", default=1024, help="Of all stages of each server.")
@click.option("--json", "json_file", type=click.Path(path_type=Path))
def main(
    against: Path, model: str | None, cells: str, rounds: int, kv_cache_mib: int, json_file: Path | None
) -> None:  # fmt: skip
    pairs = []
    with model_or_random(model) as path:
        for pair in compare(path, against, select_cells(cells.split(",")), rounds, kv_cache_mib):
            load = os.getloadavg()[0]
            print(f"{pair.name:18} {pair.old:8.1f} {pair.new:8.1f}  {pair.ratio:.3f}  load {load:.1f}", flush=True)
            pairs.append(pair)
    print("\n" + comparison_table(pairs))
    if json_file is not None:
        json_file.write_text(json.dumps([{**asdict(pair), "ratio": pair.ratio} for pair in pairs], indent=1))


if __name__ == "__main__":
    main()
