"""What a process may use of its machine: cores and memory. A container's limits are those of its cgroup."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def available_cores(root: Path = _ROOT) -> int:
    """Cores that this process may use. With more threads than its share of cores, a container's threads are held
    back most of the time, and every step waits for the last of them."""
    cores = float(len(os.sched_getaffinity(0)))
    for group in _groups("cpu", root):
        with contextlib.suppress(OSError, ValueError):  # `max` in place of a number: no limit
            quota, period = (group / "cpu.max").read_text().split()
            cores = min(cores, int(quota) / int(period))
        with contextlib.suppress(OSError, ValueError):
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:
                cores = min(cores, int(quota) / int(period))
    return max(1, int(cores))


def available_bytes(root: Path = _ROOT) -> int:
    """Memory that this process could still get; 0 where /proc does not say."""
    available = [value * 1024 for value in _entries(root / "proc/meminfo", "MemAvailable:")]
    for group in _groups("memory", root):
        for limit, used, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            with contextlib.suppress(OSError, ValueError):
                left = int((group / limit).read_text()) - int((group / used).read_text())
                # The kernel gives up its cache of files when memory is needed.
                available.append(left + sum(_entries(group / "memory.stat", cached)))
    return max(0, min(available, default=0))


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Where the limits of this process's cgroup may be written, and those of the groups around it. A container may
    see the path that its group has on the host, and find its own files at the mount."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            mount = root / "sys/fs/cgroup" / (controller if controllers else "")
            group = mount / path.lstrip("/")
            yield from (group, *(parent for parent in group.parents if parent.is_relative_to(mount)))


def _entries(file: Path, name: str) -> list[int]:
    """The numbers of a file's lines that begin with this name."""
    with contextlib.suppress(OSError):
        lines = (line.split() for line in file.read_text().splitlines())
        return [int(line[1]) for line in lines if line and line[0] == name]
    return []
