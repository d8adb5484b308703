"""Recording on a GPU by several threads, with a stand-in for torch's part; and the script that is run on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from ppserve.model.cuda.device import CudaDevice

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


def test_the_script_runs_as_the_page_says() -> None:
    """A lent GPU is there for minutes: what can fail before it is needed fails here."""
    command = "benchmarks/gpu_stage.py", "waits", "--device", "cpu", "--small", "--dtype", "float32"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("waits=0") == 2
