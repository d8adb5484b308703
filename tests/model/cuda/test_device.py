"""What only a GPU has, with stand-ins for torch's part: recording by several threads, events, the first launch."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from ppserve.errors import ConfigError
from ppserve.model.cuda.backend import launch_once
from ppserve.model.cuda.device import CudaDevice
from ppserve.model.cuda.operators import Operators
from tests.model.cuda.here import needs_triton
from tests.slow import thorough

ROOT = Path(__file__).parents[3]


def test_stages_that_are_threads_record_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each on a stream of its own, the same every time."""
    together = threading.Barrier(2)
    overlaps: list[int] = []
    streams: dict[str, list[object]] = {"first": [], "second": []}

    @contextmanager
    def graph(graph: object, *, stream: object, **kwargs: object) -> Iterator[None]:
        streams[threading.current_thread().name].append(stream)
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: MagicMock())
    for name in ("current_stream", "stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())

    def work() -> None:
        with suppress(threading.BrokenBarrierError):  # nobody else comes
            overlaps.append(together.wait(0.3))

    def record(name: str) -> None:
        threading.current_thread().name = name
        device = CudaDevice(torch.device("cuda", 0))
        for _ in range(2):
            device.record(work)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(record, streams))
    assert overlaps == []
    first, second = (set(map(id, used)) for used in streams.values())
    assert len(first) == len(second) == 1
    assert first != second


class Gpu:
    """A stream's clock: every event is reached when the work before it, of so many milliseconds, has been done.
    log: what was recorded and waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.done_s = time.monotonic()

    def give(self, work_ms: float) -> None:
        self.done_s = max(self.done_s, time.monotonic()) + work_ms / 1e3

    def record_event(self, event: Event) -> Event:
        event.reached_s = max(self.done_s, time.monotonic())
        self.log.append(f"record {event.name}")
        return event


class Event:
    def __init__(self, gpu: Gpu, name: str) -> None:
        self._gpu, self.name, self.reached_s = gpu, name, 0.0

    def query(self) -> bool:
        return time.monotonic() >= self.reached_s

    def synchronize(self) -> None:
        self._gpu.log.append(f"wait for {self.name}")
        time.sleep(max(0.0, self.reached_s - time.monotonic()))

    def elapsed_time(self, later: Event) -> float:
        assert time.monotonic() >= later.reached_s, "CUDA raises before both are reached"
        return (later.reached_s - self.reached_s) * 1e3


def test_busy_is_what_lies_between_a_steps_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host does meanwhile does not count, nor do steps that the device had to end before this one. Only
    `busy` waits, and only for this step's last event. By the host's wall a step's time lies within the host's."""
    gpu, names = Gpu(), iter("abcd")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(gpu, next(names)))
    device = CudaDevice(torch.device("cuda", 0))
    begun_ns = time.monotonic_ns()
    steps = []
    for _ in range(2):
        timing = device.timing()
        gpu.give(20)
        timing.computed()
        steps.append(timing)
    assert gpu.log == ["record a", "record b", "record c", "record d"]
    assert device.num_waits == 0
    told = [timing.busy_ns() for timing in steps]
    ended_ns = time.monotonic_ns()
    assert gpu.log[4:] == ["wait for b", "wait for d"]
    for first_ns, last_ns in told:
        assert begun_ns <= first_ns
        assert last_ns <= ended_ns
        assert last_ns - first_ns >= 20e6 - 10, "but for rounding"
    # The ledger's sums: both steps' times fit into the wall's, one behind the other.
    assert sum(last_ns - first_ns for first_ns, last_ns in told) <= ended_ns - begun_ns


def test_a_launch_that_cannot_be_compiled_says_what_to_install() -> None:
    class Broken(Operators):
        def running_sums(self, weights_RV: torch.Tensor) -> torch.Tensor:
            raise subprocess.CalledProcessError(1, ["gcc", "launcher.c"])

    with pytest.raises(ConfigError, match=r"Triton: it cannot launch .*gcc libc6-dev"):
        launch_once(Broken(), torch.device("cpu"))


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("dtypes", [["bfloat16"], *thorough(["float32", "float16"])])
def test_the_kernels_compile_for_gpus_that_are_not_here(dtypes: list[str], tmp_path: Path) -> None:
    """They have block sizes of 8, 16 and 32, heads of 64, 128 and 256, every dtype, and keys of another dtype than
    hidden states; they stay within the shared memory that such a GPU has."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.model.cuda.compiling", "90", *dtypes]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    made = Counter(line.split()[1] for line in done.stdout.splitlines())
    of_each_dtype = {"_attend": 6, "_write": 5, "_product": 2}
    of_all = {name: count * len(dtypes) for name, count in of_each_dtype.items()}
    assert made == {**of_all, "_weights": 1, "_running_sums": 1}
