"""What a process may use of its machine: cores and memory. A container's limits are those of its cgroup."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_ROOT = Path("/")


def available_cores(root: Path = _ROOT) -> int:
    """Cores that this process may use. With more threads than its share of cores, a container's threads are held
    back most of the time, and every step waits for the last of them."""
    cores = float(len(os.sched_getaffinity(0)))
    for group in _groups(root):
        with contextlib.suppress(OSError, ValueError):  # `max` in place of a number: no limit
            quota, period = (group / "cpu.max").read_text().split()
            cores = min(cores, int(quota) / int(period))
    return max(1, int(cores))


def available_bytes(root: Path = _ROOT) -> int:
    """Memory that this process could still get; 0 where /proc does not say."""
    available = [value * 1024 for value in _entries(root / "proc/meminfo", "MemAvailable:")]
    for group in _groups(root):
        with contextlib.suppress(OSError, ValueError):
            left = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
            # The kernel gives up its cache of files when memory is needed.
            available.append(left + sum(_entries(group / "memory.stat", "inactive_file")))
    return max(0, min(available, default=0))


def _groups(root: Path) -> list[Path]:
    """This process's cgroup (version 2) and those around it."""
    mount = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::/"):
                group = mount / line.removeprefix("0::/")
                return [group, *(parent for parent in group.parents if parent.is_relative_to(mount))]
    return []


def _entries(file: Path, name: str) -> list[int]:
    """The numbers of a file's lines that begin with this name."""
    with contextlib.suppress(OSError):
        lines = (line.split() for line in file.read_text().splitlines())
        return [int(line[1]) for line in lines if line and line[0] == name]
    return []
