"""A race: one workload through this server and through other programs, by turns, on this machine: `make race`.

    python benchmarks/race.py [--peers DIR --peer-script FILE] [--model NAME] [--rounds 3] [--json FILE]
                              [--at-once 1,16,64] [--precision int8] [--only 'ppserve*']

Prompts of 128 random tokens, 64 new tokens each, greedy, end-of-text ignored. This server is asked over gRPC by a
load generator on the same cores, as one stage of two threads and as two stages of one. It drafts no tokens, as the
others do not. A peer is a program of its own: `DIR/ENVIRONMENT/bin/python FILE NAME DIR DTYPE`, with MODEL, BATCH,
PROMPT, NEW and THREADS in its environment. It prints `prefill_s=` (the prompts and one token each) and `total_s=`.
Those whose environment exists take part, and all serve the weights in `DIR/MODEL`. Without peers the model is as
for `ppserve serve`, or a GPT-2 124M with random weights.

Every run is appended to the JSON file as one line, and the tables are of the whole file, so that a race can be run
in parts. Figures of a machine that others use say little: the load is printed.
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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from itertools import product
from pathlib import Path

import click
import psutil
from local_server import cpu_name, model_or_random, running
from throughput import DTYPES, Shape, timed

from ppserve.bench.caller import Caller
from ppserve.bench.measure import introduce, warm_up
from ppserve.model.cpu.kernels.variants import in_use

PROMPT, NEW, THREADS = 128, 64, 2
ONE_STAGE, TWO_STAGES = "ppserve, 1 stage of 2 threads", "ppserve, 2 stages of 1 thread"
OURS = {ONE_STAGE: (1, "--threads 2"), TWO_STAGES: (2, "--stages 2 --threads 1")}
PRECISIONS = {**DTYPES, "int4": "--dtype bfloat16 --quantization int4"}
PEERS = {
    # name as the script has it: environment, names of the precisions
    "ctranslate2": ("base", {"float32": "float32", "int8": "int8"}),
    "hf": ("base", {"float32": "float32", "bfloat16": "bfloat16"}),
    "llamacpp": ("lcpp", {"float32": "f32", "bfloat16": "bf16", "int8": "q8_0", "int4": "q4_0"}),
    "vllm": ("vllm", {"float32": "float32", "bfloat16": "bfloat16"}),
    "vllm-pp2": ("vllm", {"float32": "float32", "bfloat16": "bfloat16"}),
}
PEER_WITHIN_S = 900
MEMORY_BESIDE = 250 << 20
"""Bytes that a stage may occupy beside its weights, keys and values."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One run of one contender."""

    machine: str
    model: str
    contender: str
    precision: str
    at_once: int
    prefill_s: float
    """The prompts and one token each."""
    total_s: float
    memory: Sequence[tuple[int, int]] = ()
    """The bytes that each of our stages occupies, and those that it may."""


Figures = tuple[float, float, Sequence[tuple[int, int]]]
"""The last three of a Timing."""


def run_ours(
    name: str, model: str, precision: str, counts: Sequence[int], seed: int, kv_mib: int
) -> Iterator[Figures]:
    num_stages, shape = OURS[name]
    # Like the others, memory for keys and values is taken at the start.
    memory = f"--force-cpu --speculate off --kv-cache-memory={kv_mib // num_stages}M"
    with running(["--model", model, *shlex.split(f"{shape} {PRECISIONS[precision]} {memory}")]) as address:
        for count in counts:
            yield asyncio.run(_time_served(address.grpc, count, seed + count))


async def _time_served(target: str, count: int, seed: int) -> Figures:
    prompts, whole = Shape(count, PROMPT, 1), Shape(count, PROMPT, NEW)
    async with Caller(target) as caller:
        served = await introduce(caller, target)
        await warm_up(caller, whole.workload(served, seed), count, count)
        prefill = await timed(caller, served, prompts.workload(served, 2 * seed + 1), count, count)
        total = await timed(caller, served, whole.workload(served, 2 * seed + 2), count, count)
        stages = (await caller.topology()).stages
    allowed = [stage.weight_bytes + stage.kv_bytes + MEMORY_BESIDE for stage in stages]
    return prefill.duration, total.duration, list(zip(_occupied(), allowed, strict=True))


def _occupied() -> list[int]:
    """Bytes of each stage of the server that was started here, without pages of files, which take no memory from
    others."""
    ranks = [child for child in psutil.Process().children(recursive=True) if child.name() == "ppserve.stage"]
    ranks.sort(key=lambda rank: int(rank.environ()["RANK"]))
    statuses = [Path(f"/proc/{rank.pid}/status").read_text() for rank in ranks]
    return [int(re.findall(r"RssAnon:\s+(\d+)", status)[0]) << 10 for status in statuses]


def run_peer(
    name: str, peers: Path, script: Path, model: str, precision: str, counts: Sequence[int]
) -> Iterator[Figures | None]:
    """Nothing where it is not there or lacks the precision; None for a run that fails, which is printed."""
    environment, names = PEERS[name]
    python = peers / environment / "bin" / "python"
    if precision in names and python.exists():
        for count in counts:
            command = [str(python), str(script), name, str(peers), names[precision]]
            told = {"MODEL": model, "BATCH": count, "PROMPT": PROMPT, "NEW": NEW, "THREADS": THREADS}
            yield _time_peer(command, {key: str(value) for key, value in told.items()})


def _time_peer(command: Sequence[str], told: dict[str, str]) -> Figures | None:
    # Without our modules: one of them may have the name of a package that the peer imports.
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    what = f"{' '.join(command[2:])}, {told['BATCH']} at once"
    try:
        ran = subprocess.run(
            command, env=inherited | told, capture_output=True, text=True, timeout=PEER_WITHIN_S
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        print(f"{what}: not within {PEER_WITHIN_S} s", flush=True)
        return None
    found = dict(re.findall(r"(prefill_s|total_s)=([\d.]+)", ran.stdout))
    if len(found) < 2:
        why = ran.stderr.strip().rpartition("\n")[2]
        print(f"{what} failed: {why}", flush=True)
        return None
    return float(found["prefill_s"]), float(found["total_s"]), ()


def speed(timings: Sequence[Timing]) -> float:
    """The better the greater: tokens per second, or of a single request 1 / the seconds between two tokens."""
    total_s = statistics.median(timing.total_s for timing in timings)
    if timings[0].at_once > 1:
        return timings[0].at_once * NEW / total_s
    return (NEW - 1) / (total_s - statistics.median(timing.prefill_s for timing in timings))


def cell(timings: Sequence[Timing]) -> str:
    """Tokens per second, or of a single request the milliseconds to the first token and between two."""
    if not timings:
        return ""
    count = timings[0].at_once
    if count > 1:
        rates = [count * NEW / timing.total_s for timing in timings]
        return f"{speed(timings):.0f} ({min(rates):.0f} to {max(rates):.0f})"
    first_s = statistics.median(timing.prefill_s for timing in timings)
    return f"{1e3 * first_s:.0f}, {1e3 / speed(timings):.1f}"


def speed_table(timings: Sequence[Timing], count: int) -> list[str]:
    """Markdown, for one number of requests at once."""
    runs: dict[str, dict[str, list[Timing]]] = {name: defaultdict(list) for name in (*OURS, *PEERS)}
    for timing in timings:
        if timing.at_once == count:
            runs[timing.contender][timing.precision].append(timing)

    def ratios(what: str, ours: Iterable[str], others: Iterable[str]) -> str:
        shown = []
        for precision in PRECISIONS:
            best = [
                max((speed(runs[name][precision]) for name in names if runs[name][precision]), default=0.0)
                for names in (ours, others)
            ]
            shown.append(f"{best[0] / best[1]:.2f}" if all(best) else "")
        return row(what, shown)

    unit = "output tokens/s, median (least to most)" if count > 1 else "ms to the first token, between tokens"
    lines = [row(f"{count} at once; {unit}", PRECISIONS), "|---" * (len(PRECISIONS) + 1) + "|"]
    lines += [
        row(name, (cell(found[precision]) for precision in PRECISIONS)) for name, found in runs.items() if found
    ]
    lines.append(ratios("best of ours over best of the others", OURS, PEERS))
    return ["", *lines, ratios("two stages over vLLM's two", [TWO_STAGES], ["vllm-pp2"])]


def memory_table(timings: Sequence[Timing]) -> list[str]:
    """Markdown: what our stages occupied, and what they may."""
    what = f"MB of each stage (at most weights + KV + {MEMORY_BESIDE >> 20})"
    lines = ["", row(what, PRECISIONS), "|---" * (len(PRECISIONS) + 1) + "|"]
    for name in OURS:
        cells = []
        for precision in PRECISIONS:
            of_runs = [t.memory for t in timings if (t.contender, t.precision) == (name, precision)]
            stages = [max(stage) for stage in zip(*filter(None, of_runs), strict=True)]
            cells.append(", ".join(f"{most >> 20} ({allowed >> 20})" for most, allowed in stages))
        lines.append(row(name, cells))
    return lines


def row(first: str, cells: Iterable[str]) -> str:
    return f"| {' | '.join([first, *cells])} |"


@click.command(help=__doc__)
@click.option("--model")
@click.option("--peers", type=click.Path(path_type=Path, exists=True))
@click.option("--peer-script", type=click.Path(path_type=Path, exists=True))
@click.option("--at-once", default="1,16,64", help="numbers of requests, with commas")
@click.option("--kv-cache-mib", default=1024, help="of all stages; 64 requests of a 124M in float32 need 900")
@click.option("--precision", "precisions", multiple=True, default=list(PRECISIONS))
@click.option("--only", default="*", help="a pattern of contenders' names")
@click.option("--rounds", default=3)
@click.option("--json", "json_file", type=click.Path(path_type=Path), default=Path("race.json"))
def main(
    model: str | None, peers: Path | None, peer_script: Path | None, at_once: str, kv_cache_mib: int,
    precisions: tuple[str, ...], only: str, rounds: int, json_file: Path,
) -> None:  # fmt: skip
    counts = [int(count) for count in at_once.split(",")]
    machine, named = f"{cpu_name()}, {os.cpu_count()} cores, kernels {in_use()}", model or "gpt2rand"

    def note(name: str, precision: str, count: int, figures: Figures) -> None:
        timing = Timing(machine, named, name, precision, count, *figures)
        with json_file.open("a") as file:
            print(json.dumps(asdict(timing)), file=file)
        rate, load = count * NEW / timing.total_s, os.getloadavg()[0]
        print(f"{name:30} {precision:9} {count:3} at once {rate:7.1f} tokens/s  (load {load:.1f})", flush=True)

    with model_or_random(str(peers / named) if peers else model) as path:
        for number, precision in product(range(rounds), precisions):
            for name in (name for name in (*OURS, *PEERS) if fnmatch(name, only)):
                figures: Iterator[Figures | None] = iter(())
                if name in OURS:
                    figures = run_ours(name, path, precision, counts, 1000 * number, kv_cache_mib)
                elif peers and peer_script:
                    figures = run_peer(name, peers, peer_script, named, precision, counts)
                for count, found in zip(counts, figures, strict=False):
                    if found is not None:
                        note(name, precision, count, found)
    timings = [Timing(**json.loads(line)) for line in json_file.read_text().splitlines()]
    timings = [timing for timing in timings if timing.model == named]
    print(f"\n{named} on {machine}, load {os.getloadavg()[0]:.1f}")
    for count in sorted({timing.at_once for timing in timings}):
        print("\n".join(speed_table(timings, count)))
    print("\n".join(memory_table(timings)))


if __name__ == "__main__":
    main()
