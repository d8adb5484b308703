"""The same workload through this server and through other programs, by turns, on this machine: `make race`.

    python benchmarks/race.py [--model DIR] [--peers DIR --peer-script FILE] [--at-once 1,16,64] [--rounds 3]

Prompts of 128 random tokens, 64 new tokens each, greedy, end-of-text ignored. This server is asked over gRPC by a
load generator on the same cores, in three shapes: two stages of one thread, one stage of two, two tensor ranks of
one. Each table ends with the best of ours over the best of the others. A peer is a program of its own:
`DIR/ENVIRONMENT/bin/python FILE NAME DIR DTYPE`, with BATCH, PROMPT, NEW and THREADS in its environment. It prints
`prefill_s=` (the prompts and one token each) and `total_s=`. Those whose environment exists take part. Without
--model a GPT-2 124M with random weights is made. Figures of a machine that others use say little: the load is
printed.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from local_server import cpu_name, model_or_random, running
from throughput import DTYPES, Shape, run_once

from ppserve.model.cpu.kernels.variants import in_use

PROMPT, NEW, THREADS = 128, 64, 2
OURS = "ppserve, "
PIPELINES = {
    # ranks, which share the memory for keys and values; flags
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
    """One run of one contender."""

    contender: str
    precision: str
    at_once: int
    prefill_s: float
    """The prompts and one token each."""
    total_s: float


def run_ours(model: str, precision: str, counts: Sequence[int], number: int, kv_mib: int) -> Iterator[Timing]:
    for contender, (ranks, shape) in PIPELINES.items():
        # Like the others, memory for keys and values is taken at the start.
        flags = f"{shape} {DTYPES[precision]} --force-cpu --kv-cache-memory={kv_mib // ranks}M"
        with running(["--model", model, *shlex.split(flags)]) as address:
            for count in counts:
                run = asyncio.run(run_once(address.grpc, Shape(count, PROMPT, NEW), 100 * number + count))
                yield Timing(contender, precision, count, run.prefill_s, run.total_s)


def run_peers(directory: Path, script: Path, precision: str, counts: Sequence[int]) -> Iterator[Timing]:
    for name, environment, names in PEERS:
        python = directory / environment / "bin" / "python"
        if precision in names and python.exists():
            command = [str(python), str(script), name, str(directory), names[precision]]
            for count in counts:
                if (found := _run_peer(command, count)) is not None:
                    yield Timing(name, precision, count, *found)


def _run_peer(command: Sequence[str], count: int) -> tuple[float, float] | None:
    """None where it fails, which is printed."""
    told = {"BATCH": count, "PROMPT": PROMPT, "NEW": NEW, "THREADS": THREADS}
    # Without our modules: one of them may have the name of a package that the peer imports.
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment = inherited | {key: str(value) for key, value in told.items()}
    try:
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PEER_WITHIN_S)
    except subprocess.TimeoutExpired:
        print(f"{' '.join(command[2:])} {count} at once: not within {PEER_WITHIN_S} s", flush=True)
        return None
    found = dict(re.findall(r"(prefill_s|total_s)=([\d.]+)", ran.stdout))
    if len(found) < 2:
        why = ran.stderr.strip().rpartition("\n")[2]
        print(f"{' '.join(command[2:])} {count} at once failed: {why}", flush=True)
        return None
    return float(found["prefill_s"]), float(found["total_s"])


def speed(timings: Sequence[Timing]) -> float:
    """The better the greater: tokens per second, or of a single request 1 / the seconds after the first token."""
    total_s = statistics.median(timing.total_s for timing in timings)
    if timings[0].at_once > 1:
        return timings[0].at_once * NEW / total_s
    return 1 / (total_s - statistics.median(timing.prefill_s for timing in timings))


def cell(timings: Sequence[Timing]) -> str:
    """Tokens per second, or of a single request the milliseconds to the first token and between two."""
    if not timings:
        return ""
    count = timings[0].at_once
    if count > 1:
        rates = [count * NEW / timing.total_s for timing in timings]
        return f"{speed(timings):.0f} ({min(rates):.0f} to {max(rates):.0f})"
    first_s = statistics.median(timing.prefill_s for timing in timings)
    return f"TTFT {1e3 * first_s:.0f}, ITL {1e3 / speed(timings) / (NEW - 1):.1f}"


def table(timings: Sequence[Timing], count: int, precisions: Sequence[str]) -> str:
    """Markdown, for one number of requests at once."""
    runs: dict[tuple[str, str], list[Timing]] = defaultdict(list)
    for timing in timings:
        if timing.at_once == count:
            runs[timing.contender, timing.precision].append(timing)
    unit = "output tokens/s, median (least to most)" if count > 1 else "milliseconds"
    lines = ["", f"| {count} at once; {unit} | {' | '.join(precisions)} |", "|---" * (len(precisions) + 1) + "|"]
    for contender in dict.fromkeys(contender for contender, _ in runs):
        cells = (cell(runs.get((contender, precision), [])) for precision in precisions)
        lines.append(f"| {contender} | {' | '.join(cells)} |")
    ratios = []
    for precision in precisions:
        speeds = {name: speed(found) for (name, of), found in runs.items() if of == precision}
        ours = max((s for name, s in speeds.items() if name.startswith(OURS)), default=0.0)
        others = max((s for name, s in speeds.items() if not name.startswith(OURS)), default=0.0)
        ratios.append(f"{ours / others:.2f}" if others else "")
    return "\n".join([*lines, f"| best of ours over best of the others | {' | '.join(ratios)} |"])


@click.command(help=__doc__)
@click.option("--model", help="as for `ppserve serve --model`")
@click.option("--peers", type=click.Path(path_type=Path, exists=True))
@click.option("--peer-script", type=click.Path(path_type=Path, exists=True))
@click.option("--at-once", default="1,16,64", help="numbers of requests, with commas")
@click.option("--kv-cache-mib", default=1024, help="of all ranks; 64 requests of a 124M in float32 need 900")
@click.option("--precision", "precisions", multiple=True, default=list(DTYPES))
@click.option("--rounds", default=3)
@click.option("--json", "json_file", type=click.Path(path_type=Path), default=Path("race.json"))
def main(
    model: str | None, peers: Path | None, peer_script: Path | None, at_once: str, kv_cache_mib: int,
    precisions: tuple[str, ...], rounds: int, json_file: Path,
) -> None:  # fmt: skip
    counts = [int(count) for count in at_once.split(",")]
    timings: list[Timing] = []

    def note(timing: Timing) -> None:
        timings.append(timing)
        rate, load = timing.at_once * NEW / timing.total_s, os.getloadavg()[0]
        what = f"{timing.contender:22} {timing.precision:9} {timing.at_once:3} at once"
        print(f"{what} {rate:7.1f} tokens/s  (load {load:.1f})", flush=True)

    with model_or_random(model) as path:
        for number in range(rounds):
            for precision in precisions:
                for timing in run_ours(path, precision, counts, number, kv_cache_mib):
                    note(timing)
                if peers and peer_script:
                    for timing in run_peers(peers, peer_script, precision, counts):
                        note(timing)
    print(f"\n{cpu_name()}, {os.cpu_count()} cores, kernels {in_use()}, load {os.getloadavg()[0]:.1f}")
    for count in counts:
        print(table(timings, count, precisions))
    machine, runs = {"cpu": cpu_name(), "kernels": in_use()}, [asdict(timing) for timing in timings]
    json_file.write_text(json.dumps({"machine": machine, "runs": runs}, indent=1))


if __name__ == "__main__":
    main()
