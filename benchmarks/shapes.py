"""Every shape of a world of ranks (tensor ranks x stages x replicas): are answers equal, is the best one chosen?

    python benchmarks/shapes.py speed [--model DIR] [--world 2] [--callers 1,16] [--rounds 5]
    python benchmarks/shapes.py equal [--precision int8] [--requests 16] [--minutes 20]

`speed` serves all shapes at the same time and loads them by turns, in short rounds, so that other programs disturb
all of them alike; medians count. Beside them stands what `--parallel auto` predicts, measured anew in each round,
and how the chosen shape compares with the fastest one. The load generator runs on the same cores; the load of the
machine is printed.

`equal` serves all 13 shapes of up to four ranks, over shm and gloo, in float32, bfloat16 and int8: 66 servers of
the built-in model, some 5 minutes on two idle cores. Each gets all requests at once, with every parameter that
changes what is drawn or told. Tokens, text, log-probabilities and ends are compared with those of one rank that
had one request at a time. It ends with an error where anything differs, or did not begin within `--minutes`.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median

import click
import local_server

from ppserve.client import Client
from ppserve.core.figures import table
from ppserve.core.grid import RankGrid
from ppserve.core.partition import ExpectedWorkload
from ppserve.model.checkpoint.opening import read_architecture
from ppserve.planning.shapes import shape_name, shapes
from tests.e2e.asking import Answer, ask_all, requests_with_everything
from tests.e2e.serving import Forked, serving

PRECISIONS = {
    "float32": (),
    "bfloat16": ("--dtype", "bfloat16"),
    "int8": ("--quantization", "int8", "--kv-dtype", "int8"),
}
PREDICTED = re.compile(r"^(\d+x\d+x\d+) .* ([\d.e+]+) +[\d.e-]+$", re.MULTILINE)
"""Of the table that `--parallel auto` prints: a shape, its tokens per second, and the seconds between tokens."""
AT_ONCE = 16
NEAR = 0.8
"""A shape with at least this share of the fastest one's tokens per second is as good a choice."""


@click.group(help=__doc__)
def main() -> None:
    pass


def flags_of(grid: RankGrid) -> list[str]:
    return [f"--stages={grid.pipeline}", f"--tensor-parallel={grid.tensor}", f"--replicas={grid.data}"]


# ---- speed -------------------------------------------------------------------------------------------------


@dataclass
class Rates:
    """Tokens per second of a shape in each round."""

    predicted: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)


def predict(world: int, flags: list[str], load: ExpectedWorkload, rates: dict[str, Rates]) -> None:
    """Adds what a server with `--parallel auto` prints before it serves. Its ranks measure anew."""
    command = [sys.executable, "-m", "ppserve", "serve", *local_server.FREE_PORTS, f"--stages={world}", *flags]
    expected = [f"--expect={load.prompt},{load.new},{load.callers}", "--parallel=auto"]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "XDG_CACHE_HOME": cache}
        process = subprocess.Popen(
            local_server.dying_with_us([*command, *expected]),
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if line.startswith("(tensor ranks x"):
                break
        process.terminate()
        process.communicate(timeout=local_server.END_WITHIN_S)
    found = PREDICTED.findall(said)
    if not found:
        raise click.ClickException(f"no table in what the server said:\n{said}")
    for name, rate in found:
        rates[name].predicted.append(float(rate))


def measure(client: Client, load: ExpectedWorkload, first: int, num_requests: int) -> float:
    """Tokens per second of answers. first: the number of the first prompt; none is the same as another."""

    def ask(number: int) -> int:
        prompt = random.Random(number).choices(range(256), k=load.prompt)
        chunks = client.stream(prompt, seed=number, max_tokens=load.new, ignore_eos=True)
        return sum(chunk.num_tokens for chunk in chunks)

    begun_s = time.monotonic()
    with ThreadPoolExecutor(load.callers) as callers:
        num_tokens = sum(callers.map(ask, range(first, first + num_requests)))
    return num_tokens / (time.monotonic() - begun_s)


def by_turns(model: str, world: int, loads: list[ExpectedWorkload], rounds: int) -> list[dict[str, Rates]]:
    """For each load the rates of all shapes."""
    grids = {shape_name(grid): grid for grid in shapes(world, read_architecture(model))}
    every = [{name: Rates() for name in grids} for _ in loads]
    flags = ["--force-cpu", "--threads=1", "--dtype=float32", f"--model={model}", "--kv-cache-memory=256M"]
    for _ in range(rounds):
        for load, rates in zip(loads, every, strict=True):
            predict(world, flags, load, rates)
    with ExitStack() as held:
        clients = {}
        for name, grid in grids.items():
            server = held.enter_context(local_server.running([*flags_of(grid), *flags]))
            clients[name] = held.enter_context(Client(server.grpc))
            measure(clients[name], loads[-1], 0, 2 * loads[-1].callers)
        number = 1000
        for _ in range(rounds):
            for load, rates in zip(loads, every, strict=True):
                for name, client in clients.items():
                    rates[name].measured.append(measure(client, load, number, 2 * load.callers))
                    number += 2 * load.callers
    return every


def report(load: ExpectedWorkload, rates: dict[str, Rates]) -> None:
    predicted = {name: median(each.predicted) for name, each in rates.items() if each.predicted}
    measured = {name: median(each.measured) for name, each in rates.items()}
    chosen, fastest = (max(of, key=of.__getitem__) for of in (predicted, measured))
    rows = [("shape", "predicted/s", "measured/s", "rounds")]
    for name, each in rates.items():
        rounds = " ".join(f"{rate:.4g}" for rate in each.measured)
        rows.append((name, f"{predicted.get(name, 0.0):.4g}", f"{measured[name]:.4g}", rounds))
    share = measured[chosen] / measured[fastest]
    print(f"\n{load.callers} callers, prompts of {load.prompt} and answers of {load.new} tokens")
    print("\n".join(table(*rows, left=1)))
    verdict = "as good" if share >= NEAR else "WORSE"
    print(f"chosen: {chosen}, {share:.0%} of the fastest, {fastest}: {verdict}", flush=True)


@main.command()
@click.option("--model", default="tiny")
@click.option("--world", default=2)
@click.option("--callers", default="1,16")
@click.option("--prompt", default=64, help="Tokens of each prompt.")
@click.option("--new", default=64, help="Tokens of each answer.")
@click.option("--rounds", default=5)
def speed(model: str, world: int, callers: str, prompt: int, new: int, rounds: int) -> None:
    loads = [ExpectedWorkload(prompt, new, int(count)) for count in callers.split(",")]
    print(f"{model}, {world} ranks of one thread; load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for load, rates in zip(loads, by_turns(model, world, loads, rounds), strict=True):
        report(load, rates)
    print(f"load after: {os.getloadavg()[0]:.1f}")


# ---- equal -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """A server whose answers are compared."""

    precision: str
    grid: RankGrid
    transport: str | None
    """None where ranks exchange nothing."""

    @property
    def name(self) -> str:
        return f"{shape_name(self.grid)} {self.transport or 'alone'} {self.precision}"

    def answers(self, num_requests: int, at_once: int) -> list[tuple[Answer, ...]]:
        over = ("--transport", self.transport) if self.transport else ()
        grid = ("--tensor-parallel", str(self.grid.tensor), "--replicas", str(self.grid.data), "--threads", "1")
        with serving(self.grid.size, *grid, *PRECISIONS[self.precision], *over, by=Forked) as server:
            return ask_all(server.grpc, requests_with_everything(num_requests, seed=3), at_once)


def all_runs(precisions: tuple[str, ...]) -> Iterator[Run]:
    arch = read_architecture("tiny")
    for precision in precisions:
        for grid in (grid for world in range(1, 5) for grid in shapes(world, arch)):
            for transport in ("shm", "gloo") if grid.tensor * grid.pipeline > 1 else (None,):
                yield Run(precision, grid, transport)


@main.command()
@click.option("--requests", "num_requests", default=16)
@click.option("--minutes", default=20.0)
@click.option("--precision", "precisions", multiple=True, default=list(PRECISIONS))
def equal(num_requests: int, minutes: float, precisions: tuple[str, ...]) -> None:
    began_s = time.monotonic()
    alone = {name: Run(name, RankGrid(1, 1, 1), None).answers(num_requests, at_once=1) for name in precisions}
    differ, left = [], 0
    for run in all_runs(precisions):
        if time.monotonic() - began_s > 60 * minutes:
            left += 1
            continue
        found = run.answers(num_requests, AT_ONCE)
        num_equal = sum(own == other for own, other in zip(found, alone[run.precision], strict=True))
        if num_equal < len(found):
            differ.append(run.name)
        took_s = time.monotonic() - began_s
        print(f"{run.name}: {num_equal} of {len(found)} equal; {took_s:.0f} s", flush=True)
    print(f"other answers than alone: {', '.join(differ) or 'none'}; not begun: {left}")
    sys.exit(1 if differ or left else 0)


if __name__ == "__main__":
    main()
