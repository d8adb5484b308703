"""Every shape of up to four ranks, as real processes, answers bit for bit as one rank does for each request alone.

    python benchmarks/shapes_equal.py [--precision int8] [--requests 16] [--minutes 20]

13 shapes, tensor ranks x stages x replicas, over shm and over gloo (where ranks exchange anything), in float32,
bfloat16 and int8 (weights, keys and values): 66 servers of the built-in model, which take some 5 minutes on two
idle cores, 15 on busy ones. Each gets all requests at once, with every parameter that changes what is drawn or
told; tokens, text, log-probabilities and ends are compared with those of one rank that has had one request at a
time. Ends with an error where anything differs. What has not begun after `--minutes` is left out, and said; that
is an error as well.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import click

from tests.e2e.asking import Answer, ask_all, requests_with_everything
from tests.e2e.serving import Forked, serving

PRECISIONS = {
    "float32": (),
    "bfloat16": ("--dtype", "bfloat16"),
    "int8": ("--quantization", "int8", "--kv-dtype", "int8"),
}
AT_ONCE = 16
Shape = tuple[int, int, int]
Answers = list[tuple[Answer, ...]]


def shapes(most: int = 4) -> Iterator[Shape]:
    sizes = range(1, most + 1)
    return ((t, p, d) for t in sizes for p in sizes for d in sizes if t * p * d <= most)


def answers(shape: Shape, flags: tuple[str, ...], num_requests: int, at_once: int) -> Answers:
    tensor, stages, replicas = shape
    grid = ("--tensor-parallel", str(tensor), "--replicas", str(replicas), "--threads", "1")
    with serving(tensor * stages * replicas, *grid, *flags, by=Forked) as server:
        return ask_all(server.grpc, requests_with_everything(num_requests, seed=3), at_once)


@click.command(help=__doc__)
@click.option("--requests", "num_requests", default=16)
@click.option("--minutes", default=20.0)
@click.option("--precision", "precisions", multiple=True, default=list(PRECISIONS))
def main(num_requests: int, minutes: float, precisions: tuple[str, ...]) -> None:
    began_s = time.monotonic()
    runs = [
        (precision, shape, transport)
        for precision in precisions
        for shape in shapes()
        for transport in (("shm", "gloo") if shape[0] * shape[1] > 1 else ("local",))
    ]
    alone: dict[str, Answers] = {}
    differ, left = [], 0
    for precision, shape, transport in runs:
        if time.monotonic() - began_s > 60 * minutes:
            left += 1
            continue
        flags = PRECISIONS[precision]
        if precision not in alone:
            alone[precision] = answers((1, 1, 1), flags, num_requests, at_once=1)
        # Ranks that exchange nothing choose no transport, unless there are several of them.
        over = () if transport == "local" else ("--transport", transport)
        found = answers(shape, (*flags, *over), num_requests, AT_ONCE)
        pairs = zip(found, alone[precision], strict=True)
        wrong = sum(together != by_itself for together, by_itself in pairs)
        name = f"{'x'.join(map(str, shape))} {transport} {precision}"
        if wrong:
            differ.append(name)
        print(
            f"{name}: {len(found) - wrong} of {len(found)} requests equal;"
            f" {time.monotonic() - began_s:.0f} s, load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    print(f"{len(runs) - left - len(differ)} of {len(runs)} equal, {left} not begun")
    if differ or left:
        raise SystemExit(f"other answers than alone: {', '.join(differ) or 'none'}; not begun: {left}")


if __name__ == "__main__":
    main()
