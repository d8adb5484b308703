"""The same workload through this server and through other programs, in turns, on this machine: `make race`.

    python benchmarks/race.py [--model DIR] [--peers DIR --peer-script FILE] [--at-once 1,16,64] [--rounds 3]

Prompts of 128 random tokens, 64 new tokens each, greedy, end-of-text ignored. This server is asked over gRPC by a
load generator on the same cores, in three shapes: two stages of one thread, one stage of two, two tensor ranks of
one. Which is best depends on the workload; whoever serves chooses, so each table ends with the best of ours beside
the best of the others. Like the others it has its memory for keys and values from the start (--kv-cache-mib): on a
virtual machine whose host hands out memory lazily, clearing it while serving takes a third of a core. A peer is a
program of its own: `DIR/ENVIRONMENT/bin/python FILE NAME DIR DTYPE`, told BATCH, PROMPT, NEW and THREADS by its
environment. It prints `prefill_s=` (the prompts and one token each) and `total_s=`. Those whose environment exists
take part. Medians of all rounds; with one request at once the time to the first token and between two tokens.
Without --model a GPT-2 124M with random weights is made. Figures of a machine that others use say little: the load
is printed.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
from local_server import running
from throughput import Shape, run_once

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests and tools are no packages of the environment

from ppserve.model.cpu.kernels.variants import features, in_use
from tools.make_random_gpt2 import Shape as ModelShape
from tools.make_random_gpt2 import write_checkpoint

PROMPT, NEW, THREADS = 128, 64, 2
PRECISIONS = {
    "float32": "--dtype float32",
    "bfloat16": "--dtype bfloat16",
    "int8": "--dtype bfloat16 --quantization int8",
}
OURS = "ppserve, "
PIPELINES = {
    # how many ranks, which share the memory for keys and values; flags
    f"{OURS}2 stages": (2, "--stages 2 --threads 1"),
    f"{OURS}1 stage of 2": (1, "--stages 1 --threads 2"),
    f"{OURS}2 tensor ranks": (2, "--stages 1 --tensor-parallel 2 --threads 1"),
}
PEERS = (
    # name as the script has it, environment, names of the precisions
    ("ctranslate2", "base", {"float32": "float32", "int8": "int8"}),
    ("hf", "base", {"float32": "float32", "bfloat16": "bfloat16"}),
    ("llamacpp", "lcpp", {"float32": "f32", "bfloat16": "bf16", "int8": "q8_0"}),
    ("vllm", "vllm", {"float32": "float32", "bfloat16": "bfloat16"}),
    ("vllm-pp2", "vllm", {"float32": "float32", "bfloat16": "bfloat16"}),
)
PEER_WITHIN_S = 900


@dataclass(frozen=True, slots=True)
class Timing:
    """One run: the prompts and one token each; everything. Seconds."""

    prefill_s: float
    total_s: float


Timings = dict[tuple[str, str, int], list[Timing]]
"""By contender, precision and requests at once."""


def ours(model: str, flags: str, counts: Sequence[int], number: int) -> Iterator[tuple[int, Timing]]:
    with running(["--model", model, "--force-cpu", *shlex.split(flags)]) as address:
        for count in counts:
            run = asyncio.run(run_once(address.grpc, Shape(count, PROMPT, NEW), 100 * number + count))
            yield count, Timing(run.prefill_s, run.total_s)


@dataclass(frozen=True, slots=True)
class Peers:
    """What was built in a directory, and the script that runs it."""

    directory: Path
    script: Path

    def built(self, precision: str) -> list[tuple[str, str, str]]:
        """Names, environments and the precision's name for each."""
        return [
            (name, environment, own[precision])
            for name, environment, own in PEERS
            if precision in own and (self.directory / environment / "bin" / "python").exists()
        ]

    def run(
        self, name: str, environment: str, dtype: str, count: int, sizes: tuple[int, int] = (PROMPT, NEW)
    ) -> Timing | None:
        """None where it fails, which is told. sizes: tokens of a prompt and of an answer."""
        told = {"BATCH": count, "PROMPT": sizes[0], "NEW": sizes[1], "THREADS": THREADS}
        python = self.directory / environment / "bin" / "python"
        # Without our modules: one of them may have the name of a package that the peer imports.
        inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        try:
            ran = subprocess.run(
                [python, self.script, name, self.directory, dtype],
                env=inherited | {key: str(value) for key, value in told.items()},
                capture_output=True, text=True, check=False, timeout=PEER_WITHIN_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            print(f"{name} {dtype} {count} at once: not within {PEER_WITHIN_S} s", flush=True)
            return None
        found = dict(re.findall(r"(prefill_s|total_s)=([\d.]+)", ran.stdout))
        if len(found) < 2:
            why = ran.stderr.strip().rpartition("\n")[2]
            print(f"{name} {dtype} {count} at once failed: {why}", flush=True)
            return None
        return Timing(float(found["prefill_s"]), float(found["total_s"]))


def race(
    model: str, kv_mib: int, peers: Peers | None, counts: Sequence[int], rounds: int, precisions: Sequence[str]
) -> Timings:
    """All contenders in turns."""
    timings: Timings = defaultdict(list)

    def note(contender: str, precision: str, count: int, timing: Timing) -> None:
        timings[contender, precision, count].append(timing)
        rate = count * NEW / timing.total_s
        load = os.getloadavg()[0]
        what = f"{contender:22} {precision:9} {count:3} at once"
        print(f"{what} {rate:7.1f} tokens/s  (load {load:.1f})", flush=True)

    for number in range(rounds):
        for precision in precisions:
            for contender, (ranks, shape) in PIPELINES.items():
                flags = f"{shape} {PRECISIONS[precision]} --kv-cache-memory={kv_mib // ranks}M"
                for count, timing in ours(model, flags, counts, number):
                    note(contender, precision, count, timing)
            for name, environment, dtype in peers.built(precision) if peers else ():
                for count in counts:
                    if (found := peers.run(name, environment, dtype, count)) is not None:
                        note(name, precision, count, found)
    return timings


def figure(timings: list[Timing], count: int) -> float:
    """The better the greater: tokens per second, or of a single request 1 / the seconds after the first token."""
    total_s = statistics.median(timing.total_s for timing in timings)
    if count > 1:
        return count * NEW / total_s
    return 1 / (total_s - statistics.median(timing.prefill_s for timing in timings))


def ratio(timings: Timings, precision: str, count: int) -> str:
    """How often as fast as the best of the others the best of ours is."""
    best: dict[bool, float] = defaultdict(float)
    for (contender, of, at_once), runs in timings.items():
        if (of, at_once) == (precision, count):
            is_ours = contender.startswith(OURS)
            best[is_ours] = max(best[is_ours], figure(runs, count))
    return f"{best[True] / best[False]:.2f}" if len(best) == 2 else ""


def cell(timings: list[Timing], count: int) -> str:
    """Tokens per second, or of a single request the milliseconds to the first token and between two."""
    if not timings:
        return ""
    total_s = statistics.median(timing.total_s for timing in timings)
    if count > 1:
        rates = [count * NEW / timing.total_s for timing in timings]
        return f"{count * NEW / total_s:.0f} ({min(rates):.0f} to {max(rates):.0f})"
    first_s = statistics.median(timing.prefill_s for timing in timings)
    return f"TTFT {1e3 * first_s:.0f}, ITL {1e3 * (total_s - first_s) / (NEW - 1):.1f}"


def table(timings: Timings, counts: Sequence[int], precisions: Sequence[str]) -> str:
    """One table in Markdown for each number of requests."""
    contenders = list(dict.fromkeys(contender for contender, _, _ in timings))
    lines = []
    for count in counts:
        unit = "output tokens/s, median (least to most)" if count > 1 else "milliseconds"
        lines += ["", f"| {count} at once; {unit} | {' | '.join(precisions)} |"]
        lines.append("|---" * (len(precisions) + 1) + "|")
        for contender in contenders:
            cells = (cell(timings.get((contender, precision, count), []), count) for precision in precisions)
            lines.append(f"| {contender} | {' | '.join(cells)} |")
        ratios = (ratio(timings, precision, count) for precision in precisions)
        lines.append(f"| best of ours over best of the others | {' | '.join(ratios)} |")
    return "\n".join(lines)


def cpu_name() -> str:
    with open("/proc/cpuinfo") as lines:
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


@contextmanager
def some_model(asked: str | None) -> Iterator[str]:
    """`asked`, or one of random weights as long as the race goes on."""
    if asked is not None:
        yield asked
        return
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(Path(directory), ModelShape())
        yield directory


@click.command()
@click.option("--model", help="as for `ppserve serve --model`")
@click.option("--peers", "peer_directory", type=click.Path(path_type=Path, exists=True))
@click.option("--peer-script", type=click.Path(path_type=Path, exists=True))
@click.option("--at-once", default="1,16,64", help="numbers of requests, with commas")
@click.option("--kv-cache-mib", default=1024, help="of all ranks; 64 requests of a 124M in float32 need 900")
@click.option("--precision", "precisions", multiple=True, default=list(PRECISIONS))
@click.option("--rounds", default=3)
@click.option("--json", "json_file", type=click.Path(path_type=Path), default=Path("race.json"))
def main(
    model: str | None, peer_directory: Path | None, peer_script: Path | None, at_once: str, kv_cache_mib: int,
    precisions: tuple[str, ...], rounds: int, json_file: Path,
) -> None:  # fmt: skip
    peers = Peers(peer_directory, peer_script) if peer_directory and peer_script else None
    counts = [int(count) for count in at_once.split(",")]
    machine = {"cpu": cpu_name(), "cores": os.cpu_count(), "kernels": in_use(), "features": sorted(features())}
    with some_model(model) as path:
        timings = race(path, kv_cache_mib, peers, counts, rounds, precisions)
    load = os.getloadavg()[0]
    print(f"\n{machine['cpu']}, {machine['cores']} cores, kernels {machine['kernels']}, load {load:.1f}")
    print(table(timings, counts, precisions))
    records = [
        {
            "contender": contender,
            "precision": precision,
            "at_once": count,
            "runs": [{"prefill_s": timing.prefill_s, "total_s": timing.total_s} for timing in runs],
        }
        for (contender, precision, count), runs in timings.items()
    ]
    workload = {"prompt": PROMPT, "new": NEW, "threads": THREADS}
    json_file.write_text(json.dumps({"machine": machine, "workload": workload, "records": records}, indent=1))


if __name__ == "__main__":
    main()
