"""Thousands of damaged checkpoints, by hand: python benchmarks/fuzz_checkpoints.py [--cases 2000] [--seed 1000]

Every case must load or be refused in one line; a crash, a hang (over 10 s), another exception or memory
beyond a few hundred megabytes ends the run with the format and the seed that reproduce it. Each format runs
in a process of its own, so that a crash of the reader is seen and named.
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
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.model.checkpoint.damage import attempt, damaged, write_originals

HANG_S = 10
MAX_RSS_BYTES = 1 << 30


@dataclass(frozen=True)
class Outcome:
    """loaded, refused: cases. files: refusals by what they named. slowest_s, rss_bytes: the worst of all cases."""

    loaded: int
    refused: int
    reasons: Counter[str]
    slowest_s: float
    rss_bytes: int


def run_cases(original: Path, seeds: range, connection: Connection) -> None:
    """In a child: report each seed before it is tried, and the outcome at the end."""
    faulthandler.enable()
    loaded, reasons, slowest_s = 0, Counter[str](), 0.0
    with tempfile.TemporaryDirectory() as directory:
        for seed in seeds:
            connection.send(seed)
            case = damaged(original, Path(directory), seed)
            begin = time.perf_counter()
            refusal = attempt(case)
            slowest_s = max(slowest_s, time.perf_counter() - begin)
            if refusal is None:
                loaded += 1
            else:
                reasons[refusal.field or Path(refusal.path).suffix or "directory"] += 1
            shutil.rmtree(case)
    rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    connection.send(Outcome(loaded, reasons.total(), reasons, slowest_s, rss_bytes))


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000, help="per format")
    parser.add_argument("--seed", type=int, default=1000, help="the first one")
    arguments = parser.parse_args()
    failures = []
    with tempfile.TemporaryDirectory() as directory:
        for name, original in write_originals(Path(directory)).items():
            outcome = fuzz(name, original, range(arguments.seed, arguments.seed + arguments.cases))
            if isinstance(outcome, str):
                failures.append(outcome)
                print(f"FAILED {outcome}", flush=True)
                continue
            print(
                f"{name:22} {outcome.refused:6} refused {outcome.loaded:6} loaded"
                f"   slowest {outcome.slowest_s * 1e3:6.0f} ms   resident {outcome.rss_bytes >> 20} MB",
                flush=True,
            )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
