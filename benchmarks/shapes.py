"""Every shape of a world of ranks (tensor ranks x stages x replicas): are answers equal, is the best one chosen?

    python benchmarks/shapes.py speed [--model DIR] [--world 2] [--callers 1,16] [--rounds 5]
    python benchmarks/shapes.py equal [--model smollm2] [--precision int4+kv8] [--requests 16] [--minutes 30]

`speed` serves all shapes at the same time and loads them by turns, in short rounds, so that other programs disturb
all of them alike; medians count. The shape that `--parallel auto` takes is compared with the fastest one. The load
generator runs on the same cores; the load of the machine is printed.

`equal` serves all shapes of up to four ranks, over shm and gloo, and two stages with other settings and kernels:
some 30 servers for each precision. Each gets all requests at once, with every parameter that changes what is drawn
or told, and again when it knows their prefixes. Tokens, text, log-probabilities and ends are compared with those
of one rank that had one request at a time (where AMX sums bfloat16, of one with the same sums). It ends with an
error where anything differs, or did not begin within `--minutes`.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

import click
import local_server

from ppserve.client import Client
from ppserve.core.figures import table
from ppserve.core.grid import RankGrid
from ppserve.core.partition import ExpectedWorkload
from ppserve.model.checkpoint.opening import read_architecture
from ppserve.model.cpu.kernels.variants import VARIABLE, available, features, in_use
from ppserve.planning.shapes import shape_name, shapes
from tests.e2e.asking import Answer, ask_all, requests_with_everything
from tests.e2e.serving import Forked, serving, torchrun
from tests.model.cpu.products import arithmetic

PRECISIONS = {
    "float32": (),
    "bfloat16": ("--dtype", "bfloat16"),
    "int8": ("--quantization", "int8"),
    "int4": ("--quantization", "int4"),
    "kv8": ("--kv-dtype", "int8"),
}
"""May be joined: int8+kv8."""
SETTINGS = {
    "chunks": ("--prefill-chunk", "5"),
    "no prefix cache": ("--prefix-cache", "off"),
    "small blocks": ("--block-size", "3", "--max-num-seqs", "7"),
    "no draft tokens": ("--speculate", "off"),
    "draft tokens": ("--speculate", "5"),
}
AT_ONCE = 16
NEAR = 0.8
"""A shape with at least this share of the fastest one's tokens per second is as good a choice."""
Rates = dict[str, list[float]]


@click.group(help=__doc__)
def main() -> None:
    pass


def flags_of(grid: RankGrid) -> list[str]:
    return [f"--stages={grid.pipeline}", f"--tensor-parallel={grid.tensor}", f"--replicas={grid.data}"]


# ---- speed -------------------------------------------------------------------------------------------------


def choose(world: int, flags: list[str], load: ExpectedWorkload) -> str:
    """The shape that a server takes with `--parallel auto`."""
    expected = f"--expect={load.prompt},{load.new},{load.callers}"
    with local_server.running([f"--stages={world}", "--parallel=auto", expected, *flags]) as server:
        with Client(server.grpc) as client:
            topology = client.topology()
    replicas = len(topology.replicas)
    stages = len(topology.stages) // replicas
    return shape_name(RankGrid(world // (replicas * stages), replicas, stages))


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


def by_turns(model: str, world: int, flags: list[str], loads: list[ExpectedWorkload], rounds: int) -> list[Rates]:
    """For each load the tokens per second of all shapes, one a round."""
    grids = {shape_name(grid): grid for grid in shapes(world, read_architecture(model))}
    every: list[Rates] = [{name: [] for name in grids} for _ in loads]
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
                    rates[name].append(measure(client, load, number, 2 * load.callers))
                    number += 2 * load.callers
    return every


@main.command()
@click.option("--model", default="tiny")
@click.option("--world", default=2)
@click.option("--callers", default="1,16")
@click.option("--prompt", default=64, help="Tokens of each prompt.")
@click.option("--new", default=64, help="Tokens of each answer.")
@click.option("--rounds", default=5)
def speed(model: str, world: int, callers: str, prompt: int, new: int, rounds: int) -> None:
    loads = [ExpectedWorkload(prompt, new, int(count)) for count in callers.split(",")]
    memory = "--kv-cache-memory=256M", f"--max-model-len={prompt + new}"
    flags = ["--force-cpu", "--threads=1", "--dtype=float32", f"--model={model}", *memory]
    print(f"{model}, {world} ranks of one thread; load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    choices = [choose(world, flags, load) for load in loads]
    for load, chosen, rates in zip(loads, choices, by_turns(model, world, flags, loads, rounds), strict=True):
        medians = {name: median(each) for name, each in rates.items()}
        fastest = max(medians, key=medians.__getitem__)
        share = medians[chosen] / medians[fastest]
        print(f"\n{load.callers} callers, prompts of {load.prompt} and answers of {load.new} tokens")
        rows = ((name, f"{medians[name]:.4g}", " ".join(f"{r:.4g}" for r in each)) for name, each in rates.items())
        print("\n".join(table(("shape", "tokens/s", "rounds"), *rows, left=1)))
        verdict = "as good" if share >= NEAR else "WORSE"
        print(f"chosen: {chosen}, {share:.0%} of the fastest, {fastest}: {verdict}", flush=True)
    print(f"load after: {os.getloadavg()[0]:.1f}")


# ---- equal -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """A server whose answers are compared."""

    model: str
    precision: str
    grid: RankGrid
    setting: str
    """What differs from the defaults: a transport, one of SETTINGS, or kernels."""
    flags: tuple[str, ...] = ()
    kernels: str | None = None

    @property
    def name(self) -> str:
        return f"{self.precision} {shape_name(self.grid)} {self.setting}"

    @property
    def arithmetic(self) -> str:
        """Equal for runs that are to give the same bits: AMX sums bfloat16 in an order of its own."""
        precision = "bfloat16" if "bfloat16" in self.precision else "float32"
        return arithmetic(precision, self.kernels or in_use())

    def answers(self, num_requests: int, at_once: int, times: int = 1) -> list[list[tuple[Answer, ...]]]:
        grid = ("--tensor-parallel", str(self.grid.tensor), "--replicas", str(self.grid.data), "--threads", "1")
        numbers = (flag for part in self.precision.split("+") for flag in PRECISIONS[part])
        flags = ("--model", self.model, *grid, *numbers, *self.flags)
        # Kernels are chosen when they are imported, so by a fresh interpreter.
        env, by = ({VARIABLE: self.kernels}, torchrun) if self.kernels else (None, Forked)
        with serving(self.grid.size, *flags, env=env, by=by) as server:
            requests = requests_with_everything(num_requests, seed=3)
            return [ask_all(server.grpc, requests, at_once) for _ in range(times)]


def all_runs(model: str, precision: str) -> Iterator[Run]:
    arch = read_architecture(model)
    for grid in (grid for world in range(1, 5) for grid in shapes(world, arch)):
        for transport in ("shm", "gloo") if grid.tensor * grid.pipeline > 1 else ("auto",):
            yield Run(model, precision, grid, transport, ("--transport", transport))
    two_stages = RankGrid(1, 1, 2)
    for setting, flags in SETTINGS.items():
        yield Run(model, precision, two_stages, setting, flags)
    for kernels in set(available(features())) - {in_use()}:
        yield Run(model, precision, two_stages, kernels, kernels=kernels)


@main.command()
@click.option("--model", default="tiny")
@click.option("--requests", "num_requests", default=16)
@click.option("--minutes", default=30.0)
@click.option("--precision", "precisions", multiple=True, default=["float32", "bfloat16", "int8+kv8", "int4"])
def equal(model: str, num_requests: int, minutes: float, precisions: tuple[str, ...]) -> None:
    began_s = time.monotonic()
    differ, left = [], 0
    for precision in precisions:
        alone: dict[str, list[tuple[Answer, ...]]] = {}
        for run in all_runs(model, precision):
            if time.monotonic() - began_s > 60 * minutes:
                left += 1
                continue
            if run.arithmetic not in alone:
                one = Run(model, precision, RankGrid(1, 1, 1), "one at a time", kernels=run.kernels)
                (alone[run.arithmetic],) = one.answers(num_requests, at_once=1)
            first, again = run.answers(num_requests, AT_ONCE, times=2)
            expected = alone[run.arithmetic] * 2
            num_equal = sum(own == other for own, other in zip(first + again, expected, strict=True))
            if num_equal < len(first + again):
                differ.append(run.name)
            took_s = time.monotonic() - began_s
            print(f"{run.name}: {num_equal} of {len(first + again)} equal; {took_s:.0f} s", flush=True)
    print(f"other answers than alone: {', '.join(differ) or 'none'}; not begun: {left}")
    sys.exit(1 if differ or left else 0)


if __name__ == "__main__":
    main()
