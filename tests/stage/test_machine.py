"""Cores and memory, as containers limit them. The files are as Linux writes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ppserve.stage.device import available_bytes, available_cores

GIB = 1 << 30
CORES = set(range(16))


def tree(root: Path, **files: str) -> Path:
    for name, text in ({"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {64 << 20} kB\n"} | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture(autouse=True)
def _many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: CORES)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 16),
        ({"proc/self/cgroup": "0::/\n"}, 16),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 16),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "350000 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "20000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "6400000 100000\n"}, 16),
        # Of a group and those around it the narrowest counts.
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
          "sys/fs/cgroup/a/b/cpu.max": "800000 100000\n"}, 2),
    ],
)  # fmt: skip
def test_cores_are_those_of_the_container(tmp_path: Path, files: dict[str, str], cores: int) -> None:
    assert available_cores(tree(tmp_path, **files)) == cores


@pytest.mark.parametrize(
    ("files", "gib"),
    [
        ({}, 64),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n",
          "sys/fs/cgroup/memory.current": f"{GIB}\n"}, 64),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
          "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
          "sys/fs/cgroup/memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}\n"}, 3),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{GIB}\n",
          "sys/fs/cgroup/memory.current": f"{2 * GIB}\n"}, 0),
    ],
)  # fmt: skip
def test_memory_is_that_of_the_container(tmp_path: Path, files: dict[str, str], gib: int) -> None:
    assert available_bytes(tree(tmp_path, **files)) == gib * GIB


def test_where_nothing_says_so_memory_is_unknown(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) == 0
