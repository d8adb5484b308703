"""Predicted against measured: serves a model on 1, 2 and 4 stages and asks the simulator about each of them.

    python benchmarks/simulator_against_server.py [--model DIR] [--stages 1,2,4] [--concurrency 16] [--json FILE]

Each server runs a closed loop of callers; its own /costs.json then feeds a simulation of the same loop. The last
column predicts every pipeline from the costs of the 1-stage server alone, as one would before buying the others.
Wants an otherwise quiet machine with a core per stage and one for the head; it prints the load it found.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import click
import local_server

from ppserve.client import Client
from ppserve.model.checkpoint.opening import read_architecture
from ppserve.planning.forecast import Intent, forecast
from ppserve.planning.machine import Wires
from ppserve.planning.scenarios import fixed_load, read_costs, simulate
from ppserve.planning.simulator import Outcome


@dataclass(frozen=True)
class Run:
    """The load, the same for server and simulator."""

    model: str
    prompt: int
    new: int
    concurrency: int
    requests: int


@dataclass(frozen=True)
class Measured:
    tokens_per_s: float
    ttft_s: float
    itl_s: float
    costs: Path


def measure(run: Run, stages: int, directory: Path) -> Measured:
    """Serves, warms up, measures, and keeps the server's cost sheet."""
    flags = ["--stages", f"{stages}", "--layers", layers(run, stages), "--model", run.model]
    with local_server.running([*flags, "--force-cpu", "--threads", "1"]) as server:
        with Client(server.grpc) as client:
            drive(client, run, range(-2 * run.concurrency, 0))
            tokens_per_s, ttft_s, itl_s = drive(client, run, range(run.requests))
        costs = directory / f"costs-{stages}.json"
        with urllib.request.urlopen(f"http://{server.metrics}/costs.json") as answer:
            costs.write_bytes(answer.read())
    return Measured(tokens_per_s, ttft_s, itl_s, costs)


def drive(client: Client, run: Run, requests: range) -> tuple[float, float, float]:
    """Output tokens per second, mean time to the first token, mean time between tokens."""

    def one(number: int) -> list[float]:
        prompt = random.Random(f"{number}").choices(range(256), k=run.prompt)  # none twice: prefixes are cached
        times = [time.monotonic()]
        for chunk in client.stream(prompt, seed=abs(number), max_tokens=run.new, ignore_eos=True):
            times += [time.monotonic()] * chunk.num_tokens
        return times

    begun = time.monotonic()
    with ThreadPoolExecutor(run.concurrency) as callers:
        streams = list(callers.map(one, requests))
    took = time.monotonic() - begun
    ttft = [times[1] - times[0] for times in streams]
    itl = [(times[-1] - times[1]) / (len(times) - 2) for times in streams]
    return sum(len(t) - 1 for t in streams) / took, sum(ttft) / len(ttft), sum(itl) / len(itl)


def layers(run: Run, stages: int) -> str:
    """The split that the simulator assumes."""
    return str(forecast(read_architecture(run.model), Intent(stages)).split)


def predict(run: Run, stages: int, costs_path: Path) -> Outcome:
    costs = read_costs(costs_path)
    load = fixed_load(run.requests, run.prompt, run.new, run.concurrency)
    plan = forecast(read_architecture(run.model), Intent(stages))
    return simulate(plan, costs, costs.wires or Wires(), load, 256)


@click.command()
@click.option("--model", default="tiny")
@click.option("--stages", default="1,2,4")
@click.option("--prompt", default=32)
@click.option("--new", default=64)
@click.option("--concurrency", default=16)
@click.option("--requests", default=96)
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(stages: str, json_path: Path | None, **load: str | int) -> None:
    run = Run(**load)  # type: ignore[arg-type]
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        first: Path | None = None
        for count in map(int, stages.split(",")):
            measured = measure(run, count, Path(directory))
            first = first or measured.costs
            own, ahead = predict(run, count, measured.costs), predict(run, count, first)
            rows.append(
                {
                    "stages": count,
                    "measured_tokens_per_s": measured.tokens_per_s,
                    "predicted_tokens_per_s": own.output_tokens_per_s,
                    "measured_itl_ms": measured.itl_s * 1e3,
                    "predicted_itl_ms": 1e3 * sum(own.itl_s) / len(own.itl_s),
                    "measured_ttft_ms": measured.ttft_s * 1e3,
                    "predicted_ttft_ms": 1e3 * sum(own.ttft_s) / len(own.ttft_s),
                    "from_first_tokens_per_s": ahead.output_tokens_per_s,
                }
            )
    print(" | ".join(rows[0]))
    for row in rows:
        print(" | ".join(f"{value:.4g}" for value in row.values()))
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, {run}")
    if json_path:
        json_path.write_text(json.dumps({"run": vars(run), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
