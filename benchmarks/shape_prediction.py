"""Predicted against measured, for every shape of a world: what `--parallel auto` promised, and what it gives.

    python benchmarks/shape_prediction.py [--world 2,4] [--threads 1] [--callers 16] [--model tiny] [--json FILE]

In each of `--rounds` and for each world a server with `--parallel auto` measures, prints its table and is ended;
then every shape of it is served with its own flags, under the load that was predicted for. The medians of the
rounds count, since a machine's speed may change within the hour; how far the rounds lie apart, predicted and
measured, stands beside them. A prediction is good when it is within 15% of the figure, and when shapes that differ
by more than 10% are in the right order. What could be reached at all on this machine is said by the rounds too:
how often what one measured is within 15% of the median of the others. A loop of Python, timed fifty times a second
by its own CPU time, says how fast the machine was while ranks measured and while a shape was served: `at equal
speed` is the error that is left when the prediction is scaled by that, round by round. Then follows what ranks,
head and callers compute for a token, in CPU time, and how many tokens a second the cores allow with that, which
other programs on the machine change less than what was measured, and how long the cores were idle. Wants an
otherwise quiet machine; it prints the load it found. With a FILE that exists, its rounds count as well.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import click
import local_server
import psutil
from simulator_against_server import Run, drive

from ppserve.client import Client
from ppserve.core.figures import table
from ppserve.model.compiled.cache_directory import VARIABLE, cache_directory
from ppserve.stage.host import cores_here
from tests.orphans import dying_with_us

ROW = re.compile(
    r"^(\d+)x(\d+)x(\d+) .*? ([\d.]+(?:e\+\d+)?) +[\d.]+ ms +([\d.]+) ms +[\d.]+ ms +\d+%$", re.MULTILINE
)
WITHIN, APART = 0.15, 0.10
# Before a table is printed.
_MEASURED_S = 5.0


# Says how long a loop takes on this machine, again and again, until its input ends.
_LOOP = """
import select, sys, time
while not select.select([sys.stdin], [], [], 0.02)[0]:
    began_s = time.thread_time()
    for number in range(3_000):
        number * number
    print(time.monotonic(), time.thread_time() - began_s, flush=True)
"""


@dataclass(frozen=True)
class Figures:
    """Of a round. cpu_us: what ranks, head and callers computed for a token. idle: share of the cores' time.
    loop_us: what a loop took meanwhile."""

    tokens_per_s: float
    itl_s: float
    cpu_us: tuple[float, ...] = ()
    idle: float = 0.0
    loop_us: float = 0.0

    @classmethod
    def median(cls, rounds: list[Figures]) -> Figures:
        cpu_us = tuple(map(median, zip(*(each.cpu_us for each in rounds), strict=True)))
        others = ((each.tokens_per_s, each.itl_s, each.idle, each.loop_us) for each in rounds)
        rate, itl_s, idle, loop_us = map(median, zip(*others, strict=True))
        return cls(rate, itl_s, cpu_us, idle, loop_us)


@dataclass
class Shape:
    """Its rounds."""

    tensor: int
    stages: int
    replicas: int
    promised: list[Figures] = field(default_factory=list)
    given: list[Figures] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.tensor}x{self.stages}x{self.replicas}"

    @property
    def flags(self) -> list[str]:
        return [f"--stages={self.stages}", f"--tensor-parallel={self.tensor}", f"--replicas={self.replicas}"]

    @property
    def predicted(self) -> Figures:
        return Figures.median(self.promised)

    @property
    def measured(self) -> Figures:
        return Figures.median(self.given)

    @property
    def error(self) -> float:
        return self.predicted.tokens_per_s / self.measured.tokens_per_s - 1

    @property
    def error_at_equal_speed(self) -> float:
        """The median of the rounds', each with its prediction made for the speed that the machine had later."""
        rounds = zip(self.promised, self.given, strict=True)
        return median(p.tokens_per_s * p.loop_us / g.loop_us / g.tokens_per_s - 1 for p, g in rounds)

    @property
    def again(self) -> list[float]:
        """How far each round's measurement is from the median of the others."""
        rates = [each.tokens_per_s for each in self.given]
        return [rate / median(rates[:i] + rates[i + 1 :]) - 1 for i, rate in enumerate(rates) if len(rates) > 1]


def span(rounds: list[Figures]) -> str:
    """The least and the greatest, from the median."""
    rates = [each.tokens_per_s for each in rounds]
    return f"{min(rates) / median(rates) - 1:+.0%} {max(rates) / median(rates) - 1:+.0%}"


def read(path: Path | None) -> dict[str, dict[str, Shape]]:
    """By world and name, as `main` has written them."""
    if path is None or not path.exists():
        return {}
    found: dict[str, dict[str, Shape]] = {}
    for world, shapes in json.loads(path.read_text()).items():
        for of in shapes:
            rounds = {which: [Figures(**each) for each in of[which]] for which in ("promised", "given")}
            shape = Shape(**of | rounds)
            found.setdefault(world, {})[shape.name] = shape
    return found


LoopUs = Callable[[float], float]
"""How long a loop took, the median since a time."""


@contextlib.contextmanager
def watched_speed() -> Iterator[LoopUs]:
    """Of the machine, during the block."""
    with tempfile.TemporaryDirectory() as directory, open(Path(directory, "told"), "ab") as told:
        command = dying_with_us([sys.executable, "-ISc", _LOOP])
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=told)

        def loop_us(since_s: float) -> float:
            lines = Path(told.name).read_text().splitlines()[:-1]  # the last may be half a line
            times = (tuple(map(float, line.split())) for line in lines)
            return 1e6 * median(took_s for at_s, took_s in times if at_s >= since_s)

        try:
            yield loop_us
        finally:
            process.kill()
            process.communicate()


def predict(world: int, flags: list[str], shapes: dict[str, Shape], loop_us: LoopUs) -> None:
    """The table that a server prints before it serves. Ranks measure anew, with the kernels that are there."""
    kernels = cache_directory(os.environ, Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory() as cache:
        said, done_s = _said(world, flags, {**os.environ, "XDG_CACHE_HOME": cache, VARIABLE: str(kernels)})
    found = ROW.findall(said)
    if not found:
        raise click.ClickException(f"no table in what the server said:\n{said}")
    for tensor, stages, replicas, rate, itl_ms in found:
        shape = Shape(int(tensor), int(stages), int(replicas))
        figures = Figures(float(rate), float(itl_ms) / 1e3, loop_us=loop_us(done_s - _MEASURED_S))
        shapes.setdefault(shape.name, shape).promised.append(figures)


def _said(world: int, flags: list[str], environment: dict[str, str]) -> tuple[str, float]:
    """And when it had said it."""
    command = [sys.executable, "-m", "ppserve", "serve", *local_server.FREE_PORTS, f"--stages={world}"]
    process = subprocess.Popen(
        [*command, "--parallel=auto", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if line.startswith("(tensor ranks x"):
                break
        return said, time.monotonic()
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=local_server.END_WITHIN_S)
        except subprocess.TimeoutExpired:
            left = "\n".join(" ".join(each.cmdline()) for each in psutil.Process().children(recursive=True))
            print(f"it did not end after SIGTERM; it said:\n{said}\nprocesses left:\n{left}", file=sys.stderr)
            process.kill()  # its ranks end with it
            raise


def cpu_s() -> tuple[float, ...]:
    """CPU time so far of this process' server, its ranks and the rest of it, and of this process."""
    ranks = rest = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            times, is_rank = process.cpu_times(), "ppserve.stage" in process.cmdline()
            ranks += is_rank * (times.user + times.system)
            rest += (not is_rank) * (times.user + times.system)
    return ranks, rest, time.process_time()


def idle_s() -> float:
    """So far, of all cores that this process may use."""
    every = psutil.cpu_times(percpu=True)
    return sum(every[core].idle for core in os.sched_getaffinity(0))


def come_to_rest() -> None:
    """Until the server does nothing."""
    while True:
        before_s = cpu_s()
        time.sleep(1.0)
        if sum(cpu_s()[:2]) - sum(before_s[:2]) < 0.1:
            return


def measure(shape: Shape, run: Run, flags: list[str], loop_us: LoopUs) -> None:
    with local_server.running([*shape.flags, *flags]) as server, Client(server.grpc) as client:
        # Until one slot more has been tried (`core/scheduling/slot_count.py`): the time after that is predicted.
        drive(client, run, range(-4 * run.concurrency, 0))
        come_to_rest()
        before_s, idle_before_s, began_s = cpu_s(), idle_s(), time.monotonic()
        per_s, _, itl_s = drive(client, run, range(run.requests))
        idle = (idle_s() - idle_before_s) / (time.monotonic() - began_s) / cores_here()
        took_us = loop_us(began_s)
        spent_s = [after - before for after, before in zip(cpu_s(), before_s, strict=True)]
    cpu_us = tuple(1e6 * seconds / (run.requests * run.new) for seconds in spent_s)
    shape.given.append(Figures(per_s, itl_s, cpu_us, idle, took_us))


def wrong_order(shapes: list[Shape]) -> list[str]:
    """Pairs that differ by more than APART as measured, and are predicted the other way round."""
    pairs = itertools.permutations(shapes, 2)
    return [
        f"{a.name} before {b.name}"
        for a, b in pairs
        if a.measured.tokens_per_s < (1 - APART) * b.measured.tokens_per_s
        and a.predicted.tokens_per_s > b.predicted.tokens_per_s
    ]


@click.command()
@click.option("--world", default="2,4", help="Numbers of ranks.")
@click.option("--model", default="tiny")
@click.option("--threads", default=1, help="Of each rank.")
@click.option("--callers", default=16)
@click.option("--prompt", default=64, help="Tokens of each prompt.")
@click.option("--new", default=64, help="Tokens of each answer.")
@click.option("--rounds", default=3)
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(
    world: str, model: str, threads: int, callers: int, prompt: int, new: int, rounds: int, path: Path | None
) -> None:
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    # A server that has just started makes memory for keys and values ready beside the first requests: 50 to 110 us
    # of CPU time for a token, which is over when all of it has been used. This one has it before.
    flags = ["--force-cpu", f"--threads={threads}", "--dtype=float32", f"--model={model}", "--kv-cache-memory=64M"]
    expected = [f"--expect={prompt},{new},{callers}"]
    run = Run(model, prompt, new, callers, requests=12 * callers)
    every = read(path)
    with watched_speed() as loop_us:
        for number in range(rounds):
            for count in map(int, world.split(",")):
                found = every.setdefault(str(count), {})
                predict(count, [*flags, *expected], found, loop_us)
                for shape in found.values():
                    measure(shape, run, flags, loop_us)
            print(f"round {number + 1} of {rounds}; load {os.getloadavg()[0]:.1f}", flush=True)
            if path is not None:
                as_dicts = {count: [asdict(each) for each in found.values()] for count, found in every.items()}
                path.write_text(json.dumps(as_dicts, indent=1))
    for found in every.values():
        report(list(found.values()))


def report(shapes: list[Shape]) -> None:
    spent = ("ranks' us/token", "head's", "callers'", "cores allow/s", "idle")
    rates = ("predicted/s", "rounds", "measured/s", "rounds", "error", "at equal speed")
    rows = [("shape", *rates, "predicted ITL", "measured ITL", *spent)]
    for each in shapes:
        sides = (each.predicted, each.promised), (each.measured, each.given)
        rates = (*(text for of, rounds in sides for text in (f"{of.tokens_per_s:.0f}", span(rounds))),)
        times = (f"{1e3 * of.itl_s:.2f} ms" for of, _ in sides)
        spent_us = each.measured.cpu_us
        allowed_per_s = 1e6 * cores_here() / sum(spent_us)
        error = f"{each.error:+.0%}"
        at_equal_speed = f"{each.error_at_equal_speed:+.0%}"
        told = (*(f"{us:.0f}" for us in spent_us), f"{allowed_per_s:.0f}", f"{each.measured.idle:.0%}")
        rows.append((each.name, *rates, error, at_equal_speed, *times, *told))
    print("\n".join(table(*rows, left=1)))
    good = sum(abs(each.error) <= WITHIN for each in shapes)
    order = wrong_order(shapes)
    equal = sum(abs(each.error_at_equal_speed) <= WITHIN for each in shapes)
    of = f"{good} of {len(shapes)} within {WITHIN:.0%}, {equal} at equal speed"
    print(f"{of}; order: {', '.join(order) or 'right'}")
    again = [abs(error) <= WITHIN for each in shapes for error in each.again]
    if again:
        print(f"measured again: {sum(again)} of {len(again)} within {WITHIN:.0%} of the others", flush=True)


if __name__ == "__main__":
    main()
