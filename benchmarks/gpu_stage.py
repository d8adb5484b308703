"""Checks and times a stage on a GPU, in one call: what docs/gpu.md lists as unverified.

    python benchmarks/gpu_stage.py [SECTION ...] [--dtype bfloat16] [--json FILE]

Sections: waits, invariance, steps, host, prompts, served, ranks, tests. Without any, all of them, each in a
process of its own that is ended after so many seconds (together 10 minutes); one that fails says why and the
others go on. What was found until then is in FILE. Weights are random. Steps are timed by the host, over many in a
row, and by the device's own events; the floor is bytes over bandwidth. `--device cpu --small` tries the script
itself, by reference operators.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import click
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gpu_bench import LIMITS_S, Bench
from benchmarks.gpu_checks import invariance, ranks, tests, waits
from benchmarks.gpu_timings import host, prompts, served, steps

SECTIONS: dict[str, Callable[[Bench], None]] = {
    of.__name__: of for of in (waits, invariance, steps, host, prompts, served, ranks, tests)
}


def run_one(bench: Bench, name: str) -> bool:
    """Whether it could be run, and all that it claims holds."""
    try:
        SECTIONS[name](bench)
    except Exception:
        traceback.print_exc()
        return False
    return not bench.wrong


def run_apart(name: str, options: list[str], limit_s: float, figures: Path) -> bool:
    """A section in a process of its own: what hangs in the driver can only be killed."""
    command = [sys.executable, __file__, name, "--here", *options, "--json", str(figures)]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait(limit_s) == 0
    except subprocess.TimeoutExpired:
        print(f"{name}: not done within {limit_s:.0f} s", flush=True)
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
        process.wait()


@click.command()
@click.argument("sections", nargs=-1, type=click.Choice(list(SECTIONS)))
@click.option("--device", default="cuda:0")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="bfloat16")
@click.option("--small", is_flag=True, help="A tiny model: to try this script.")
@click.option("--json", "path", type=click.Path(path_type=Path))
@click.option("--limit", type=float, help="Seconds that a section may take, instead of its own number.")
@click.option("--here", is_flag=True, hidden=True, help="One section, in this process.")
def main(
    sections: tuple[str, ...], path: Path | None, limit: float | None, here: bool, small: bool, **on: str
) -> None:
    if here:
        sys.exit(not run_one(Bench(torch.device(on["device"]), on["dtype"], small, path), sections[0]))
    options = ["--device", on["device"], "--dtype", on["dtype"], *["--small"] * small]
    figures, failed = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for name in sections or tuple(SECTIONS):
            begun, own = time.monotonic(), Path(folder, name)
            if not run_apart(name, options, limit or LIMITS_S[name], own):
                failed.append(name)
            if own.exists():
                figures |= json.loads(own.read_text())
            if path is not None:
                path.write_text(json.dumps(figures, indent=1))
            print(f"-- {name}: {time.monotonic() - begun:.0f} s", flush=True)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
