"""Tries shapes: `python -m tests.model.cpu.guarded 100000`."""

from __future__ import annotations

import argparse
import sys
import time

from tests.model.cpu.guarded.batches import Batches
from tests.model.cpu.guarded.memory import Guarded, Log
from tests.model.cpu.guarded.shapes import ALL, USUAL, try_sampling


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.model.cpu.guarded", description=__doc__)
    parser.add_argument("count", type=int, help="how many shapes")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--usual", action="store_true", help="only ways of keeping numbers that tests compile")
    parser.add_argument(
        "--withheld", action="store_true", help="size each buffer too small, in turn: it must show"
    )
    parser.add_argument("--sampling", action="store_true", help="only the loops over a vocabulary")
    asked = parser.parse_args()
    begun, seeds = time.monotonic(), range(asked.first, asked.first + asked.count)
    if asked.sampling:
        log = Log()
        for seed in seeds:
            log.begin(seed)
            try_sampling(seed, Guarded(log, bool(seed % 2)))
        return 0
    batches = Batches(USUAL if asked.usual else ALL)
    print(f"kernels: {time.monotonic() - begun:.0f} s", flush=True)
    wrong = 0
    if asked.withheld:
        for buffer, having in batches.buffers(seeds).items():
            for at_end in (True, False):
                found = batches.fault_of(buffer, at_end, having)
                wrong += found is None
                print(found or f"MISSED: the {'end' if at_end else 'beginning'} of {buffer}", flush=True)
    else:
        for problem in batches.problems(seeds):
            wrong += 1
            print(problem, flush=True)
    print(f"{asked.count} shapes, {wrong} wrong, {time.monotonic() - begun:.0f} s")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
