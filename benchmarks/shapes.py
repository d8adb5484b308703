"""The same load on several shapes of two cores, in one run: throughput, latencies, where the time went.

    python benchmarks/shapes.py MODEL_DIR
    python benchmarks/shapes.py MODEL_DIR --callers 1,16 --new 32 --peers DIR --peer-script FILE

Shapes, tensor ranks x stages x replicas: one rank with one thread and with two, two tensor ranks, two stages, two
replicas. Each gets a fresh server, is warmed up, and then has so many callers, each with one request after the
other. Prompts are random and of one length, greedy, end-of-text ignored. The load generator runs on the same
machine; the load is printed, since tensor ranks wait for each other whenever one of them is not running. Below
each figure stands the ledger, and that busy, bubbles and idle sum to the same time on every stage; where they do
not, the run ends with an error. At last come the peers of `race.py` (which says what DIR and FILE are), with as
many requests at once as there were callers. Compare only figures of one run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
from pathlib import Path

from local_server import running
from race import Peers

from ppserve.bench.caller import Caller
from ppserve.bench.load import ClosedLoop, Until
from ppserve.bench.measure import introduce, measure, warm_up
from ppserve.bench.report import render_ledger
from ppserve.bench.summary import Summary, summarize
from ppserve.bench.workload import Workload

SHAPES = {
    "1x1x1 1 thread": "--stages 1 --threads 1",
    "1x1x1 2 threads": "--stages 1 --threads 2",
    "2x1x1": "--stages 1 --tensor-parallel 2 --threads 1",
    "1x2x1": "--stages 2 --threads 1",
    "1x1x2": "--stages 1 --replicas 2 --threads 1",
}
# Seconds are sent as floating-point numbers, a rounding for each of busy, six causes and idle.
_ROUNDING_NS = 100


async def loads(target: str, callers: list[int], sizes: tuple[int, int], rounds: int) -> list[Summary]:
    """One summary for each number of callers. sizes: tokens of a prompt and of an answer."""
    found = []
    async with Caller(target) as caller:
        served = await introduce(caller, target)
        for number, at_once in enumerate(callers):
            workload = Workload(lambda number, rng: sizes, served.vocab_size, number)
            await warm_up(caller, workload, at_once, at_once)
            load, until = ClosedLoop(at_once), Until(rounds * at_once)
            found.append(summarize(await measure(caller, served, workload, load, until)))
    return found


def sums(summary: Summary) -> str:
    """What busy, bubbles and idle of each stage sum to; ends the run where stages differ."""
    walls_ns = [times.wall_ns for times in summary.stages]
    if max(walls_ns) - min(walls_ns) > _ROUNDING_NS:
        raise SystemExit(f"busy, bubbles and idle sum to other times on other stages: {walls_ns} ns")
    return f"busy + bubbles + idle = {max(walls_ns) / 1e9:.6f} s on every stage"


def run_peers(peers: Peers, dtype: str, callers: list[int], sizes: tuple[int, int]) -> None:
    """Prints the tokens per second of each, the best one last."""
    for at_once in callers:
        rates = {}
        for name, environment, own in peers.built(dtype):
            timing = peers.run(name, environment, own, at_once, sizes)
            if timing is not None:
                rates[name] = at_once * sizes[1] / timing.total_s
        for name, rate in sorted(rates.items(), key=lambda pair: pair[1]):
            print(f"{name}: {at_once} at once: {rate:.1f} tok/s; load {os.getloadavg()[0]:.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="as for `ppserve serve --model`")
    parser.add_argument("--callers", default="1,16,64")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=1, help="requests of each caller")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--peers", type=Path, help="what race.py's --peers means")
    parser.add_argument("--peer-script", type=Path)
    flags = parser.parse_args()
    callers = [int(count) for count in flags.callers.split(",")]
    for name, serve in SHAPES.items():
        with running(["--model", flags.model, "--dtype", flags.dtype, *shlex.split(serve)]) as address:
            every = asyncio.run(loads(address.grpc, callers, (flags.prompt, flags.new), flags.rounds))
        for at_once, summary in zip(callers, every, strict=True):
            print(
                f"{name}: {at_once} callers: {summary.output_throughput:.1f} tok/s,"
                f" ttft {summary.ttft.median:.0f} ms, itl {summary.itl.median:.1f} ms (medians);"
                f" load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
            print("\n".join(render_ledger(summary.stages, summary.served.num_replicas)))
            print(sums(summary), flush=True)
    if flags.peers and flags.peer_script:
        run_peers(Peers(flags.peers, flags.peer_script), flags.dtype, callers, (flags.prompt, flags.new))


if __name__ == "__main__":
    main()
