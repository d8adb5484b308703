"""Simulated histories, as many as asked for: a soak of what the tests do with 2,000.

    python benchmarks/histories.py --number 100000 --first 2000

A history that fails is printed with its seed; `History(seed).run()` of tests/head/engine replays it.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests and tools are no packages of the environment

from tests.head.engine.history import History

_REPORT_EVERY_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    asked = parser.parse_args()
    logging.disable(logging.CRITICAL)
    begun_s = reported_s = time.monotonic()
    failed: list[int] = []
    number = num_faults = num_deaths = simulated_s = 0
    for seed in range(asked.first, asked.first + asked.number):
        history = History(seed)
        try:
            history.run()
        except AssertionError as error:
            failed.append(seed)
            print(f"history {seed} failed: {error}", flush=True)
        number += 1
        num_faults += history.faults.number
        num_deaths += sum(host.num_deaths for host in history.hosts)
        simulated_s += history.world.now_ns / 1e9
        now_s = time.monotonic()
        if now_s - reported_s > _REPORT_EVERY_S or now_s - begun_s > asked.seconds:
            reported_s = now_s
            print(f"{number} histories, {len(failed)} failed, {now_s - begun_s:.0f} s", flush=True)
        if now_s - begun_s > asked.seconds:
            break
    print(
        f"{number} histories in {time.monotonic() - begun_s:.0f} s: {num_faults} faults, {num_deaths} ends of "
        f"processes, {simulated_s / 3600:.1f} simulated hours, {len(failed)} failed {failed}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
