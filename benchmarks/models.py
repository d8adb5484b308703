"""The memory and the speed of models on this machine: a row for each, as docs/models.md has them.

    python benchmarks/models.py tiny smollm2:int8 DIR:bfloat16 FILE.gguf [--stages 2] [--callers 1,16]

A model may name the type of its weights after a colon. Each is served in turn, with one thread a stage and 256 MiB
of keys and values. Random prompts of 128 tokens, 64 new tokens each, greedy, end-of-text ignored, over gRPC, with
the load generator on the same machine. Memory is what the processes occupy after the load, shared pages divided
among those that share them (PSS).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress

import click
import psutil
from local_server import cpu_name, running
from throughput import DTYPES, LEAST_REQUESTS, SETTLE_S, Shape, timed

from ppserve.bench.caller import Caller
from ppserve.bench.measure import introduce, warm_up
from ppserve.core.figures import counted

KV_MIB = 256


def served_flags(model: str, stages: int) -> list[str]:
    """The flags of `ppserve serve` for NAME or NAME:TYPE."""
    name, _, kind = model.rpartition(":") if model.rpartition(":")[2] in DTYPES else (model, "", "")
    shape = ["--stages", str(stages), "--threads", "1", "--force-cpu", "--kv-cache-memory", f"{KV_MIB}M"]
    # Without draft tokens: what a random model repeats would be measured instead of its steps.
    return ["--model", name, *DTYPES.get(kind, "").split(), *shape, "--speculate", "off"]


def memory_mb() -> tuple[float, float]:
    """Megabytes of the largest stage, and of all processes below this one."""
    stages, everything = [0.0], 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            mb = process.memory_full_info().pss / 1e6
            everything += mb
            if process.name() == "ppserve.stage":
                stages.append(mb)
    return max(stages), everything


async def speeds(target: str, numbers_of_callers: Sequence[int]) -> list[float]:
    """Output tokens per second at these numbers of callers."""
    found = []
    async with Caller(target) as caller:
        served = await introduce(caller, target)
        await warm_up(caller, Shape(8, 128, 32).workload(served, 0), 8, 8)
        await asyncio.sleep(SETTLE_S)
        for place, callers in enumerate(numbers_of_callers, 1):
            shape = Shape(max(LEAST_REQUESTS, 2 * callers), 128, 64)
            summary = await timed(caller, served, shape.workload(served, place), callers, shape.num_requests)
            found.append(summary.output_throughput)
    return found


def rows(models: Sequence[str], stages: int, numbers_of_callers: Sequence[int]) -> Iterator[str]:
    """Markdown: the heads of the columns, and a row for each model."""
    heads = [counted(callers, "caller") for callers in numbers_of_callers]
    yield f"| model | largest stage | all processes | {' | '.join(heads)} |"
    yield "|---" * (3 + len(heads)) + "|"
    for model in models:
        with running(served_flags(model, stages)) as server:
            rates = asyncio.run(speeds(server.grpc, numbers_of_callers))
            stage, everything = memory_mb()
        cells = [model, f"{stage:,.0f} MB", f"{everything:,.0f} MB", *(f"{rate:,.0f}" for rate in rates)]
        yield f"| {' | '.join(cells)} |"


@click.command(help=__doc__)
@click.argument("models", nargs=-1, required=True)
@click.option("--stages", default=2)
@click.option("--callers", default="1,16")
def main(models: Sequence[str], stages: int, callers: str) -> None:
    print(f"{cpu_name()}, {os.cpu_count()} cores; before: {os.getloadavg()[0]:.1f} processes ready\n")
    for row in rows(models, stages, [int(number) for number in callers.split(",")]):
        print(row, flush=True)


if __name__ == "__main__":
    main()
