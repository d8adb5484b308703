"""A server for a measurement, of this checkout or of another one: started with flags, ended by its process id."""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests and tools are no packages of the environment

from ppserve.process.lifetime import ending_with_us
from tools.make_random_gpt2 import Shape, write_checkpoint

THIS_TREE = Path(__file__).parents[1]
READY = re.compile(r"^ppserve ready grpc=(\S+) metrics=(\S+) stages=(\d+) http=(\S+)$", re.MULTILINE)
FREE_PORTS = ("--port", "0", "--http-port", "0", "--metrics-port", "0")
START_WITHIN_S = 300.0
END_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens: HOST:PORT of gRPC, of its metrics page and of HTTP."""

    grpc: str
    metrics: str
    http: str
    ready_s: float
    """Seconds from its start to its ready line."""


@contextmanager
def running(flags: Sequence[str], tree: Path = THIS_TREE) -> Iterator[Address]:
    """A ready server of the checkout `tree` with these flags of `ppserve serve`, and none of its processes
    afterwards, also where the measurement is killed."""
    command = ending_with_us([sys.executable, "-m", "ppserve", "serve", *FREE_PORTS, *flags])
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, cwd=tree,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(tree)},
    )  # fmt: skip
    try:
        yield _wait_ready(process, command)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(process: subprocess.Popen[bytes], command: Sequence[str]) -> Address:
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    begun_s = time.monotonic()
    seen = ""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (match := READY.search(seen)) is None:
            selector.select(1.0)
            seen += (process.stdout.read() or b"").decode(errors="replace")
            if process.poll() is not None or time.monotonic() - begun_s > START_WITHIN_S:
                raise SystemExit(f"no server: {' '.join(command)}\n{seen}")
    return Address(match[1], match[2], match[4], time.monotonic() - begun_s)


@contextmanager
def model_or_random(model: str | None) -> Iterator[str]:
    """`model`, or a GPT-2 124M of random weights that is deleted afterwards. A path becomes absolute, because
    servers run in the directory of their checkout."""
    if model is not None:
        yield str(Path(model).absolute()) if Path(model).exists() else model
        return
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(Path(directory), Shape())
        yield directory


def cpu_name() -> str:
    with open("/proc/cpuinfo") as lines:
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
