"""Checkpoints by the thousand, where the suite has some hundreds.

    python benchmarks/checkpoints.py fuzz [--cases 2000] [--seed 1000]

Damaged files of every format. Each must load or be refused in one line. A crash, a hang (over 10 s), another
exception or more than 1 GiB of memory is named by format and seed. Each format has a process of its own.

    python benchmarks/checkpoints.py parity [--prompts 100] [--tokens 64]

Every format and config field over 1, 2 and 3 stages. Greedy tokens must be identical and logits within 1e-3 of
transformers (Hugging Face formats) or of a plain recomputation (llm.c, nanoGPT).
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import resource
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.model.checkpoint.damage import attempt, damaged, write_originals
from tests.model.checkpoint.parity import SPLITS, VARIANTS, check

HANG_S = 10
MAX_RSS_BYTES = 1 << 30


@dataclass(frozen=True)
class Outcome:
    """How many cases were loaded and refused, and the worst of them."""

    loaded: int
    refused: int
    slowest_s: float
    rss_bytes: int


def run_cases(original: Path, seeds: range, connection: Connection) -> None:
    """In a child: report each seed before it is tried, and the outcome at the end."""
    faulthandler.enable()
    loaded, refused, slowest_s = 0, 0, 0.0
    with tempfile.TemporaryDirectory() as directory:
        for seed in seeds:
            connection.send(seed)
            case = damaged(original, Path(directory), seed)
            begin = time.perf_counter()
            if attempt(case) is None:
                loaded += 1
            else:
                refused += 1
            slowest_s = max(slowest_s, time.perf_counter() - begin)
            shutil.rmtree(case)
    rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    connection.send(Outcome(loaded, refused, slowest_s, rss_bytes))


def fuzz(name: str, original: Path, seeds: range) -> Outcome | str:
    """The outcome, or a line that says which seed went wrong and how."""
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=run_cases, args=(original, seeds, theirs))
    child.start()
    theirs.close()
    seed: int | None = None
    try:
        while True:
            if not ours.poll(HANG_S + (60 if seed is None else 0)):
                return f"{name}: seed {seed} hangs"
            message = ours.recv()
            if isinstance(message, Outcome):
                if message.rss_bytes > MAX_RSS_BYTES:
                    return f"{name}: {message.rss_bytes >> 20} MB were resident"
                return message
            seed = message
    except EOFError:
        child.join()
        return f"{name}: seed {seed} ended the process (exit code {child.exitcode})"
    finally:
        child.kill()
        child.join()


def fuzz_all(num_cases: int, first_seed: int) -> bool:
    """Whether all formats pass."""
    failures = 0
    with tempfile.TemporaryDirectory() as directory:
        for name, original in write_originals(Path(directory)).items():
            outcome = fuzz(name, original, range(first_seed, first_seed + num_cases))
            if isinstance(outcome, str):
                failures += 1
                print(f"FAILED {outcome}", flush=True)
                continue
            worst = f"slowest {outcome.slowest_s * 1e3:6.0f} ms   resident {outcome.rss_bytes >> 20} MB"
            print(f"{name:22} {outcome.refused:6} refused {outcome.loaded:6} loaded   {worst}", flush=True)
    return not failures


def compare_all(num_prompts: int, num_tokens: int) -> None:
    """Raises AssertionError where a checkpoint's tokens or logits are not those of its authors."""
    print("| checkpoint | stages | greedy tokens | largest difference of a logit | s |\n|---|---|---|---|---|")
    for name, make in VARIANTS.items():
        with tempfile.TemporaryDirectory() as directory:
            authored = make(Path(directory))
            for split in SPLITS:
                begin = time.perf_counter()
                worst = check(authored, split, num_prompts, num_tokens)
                seconds = time.perf_counter() - begin
                count = f"{num_prompts * num_tokens} identical"
                print(f"| {name} | {split.count(',') + 1} | {count} | {worst:.1e} | {seconds:.0f} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("fuzz", "parity"))
    parser.add_argument("--cases", type=int, default=2000, help="per format")
    parser.add_argument("--seed", type=int, default=1000, help="the first one")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    if arguments.what == "fuzz":
        return 0 if fuzz_all(arguments.cases, arguments.seed) else 1
    compare_all(arguments.prompts, arguments.tokens)
    return 0


if __name__ == "__main__":
    sys.exit(main())
