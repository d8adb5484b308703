"""How many cores, how much memory and how many processes this machine, or a container, lets a process have.

Both versions of cgroups are read.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
from pathlib import Path

import psutil

_ROOT = Path("/")

# Enough for the server, and so few that programs which close every possible descriptor stay fast.
_OPEN_FILES = 65_536


def available_cores(root: Path = _ROOT) -> int:
    """Return how many cores this process may use. A container's share may be less than the machine has."""
    cores = float(len(os.sched_getaffinity(0)))
    for group in _groups(root, "cpu"):
        with contextlib.suppress(OSError, ValueError):  # `max` in place of a number: no limit
            quota, period = (group / "cpu.max").read_text().split()
            cores = min(cores, int(quota) / int(period))
        with contextlib.suppress(OSError, ValueError):
            if (limit := _number(group / "cpu.cfs_quota_us")) > 0:  # -1: there is no limit
                cores = min(cores, limit / _number(group / "cpu.cfs_period_us"))
    return max(1, int(cores))


def available_bytes(root: Path = _ROOT) -> int:
    """Return how many bytes of memory this process could still get; 0 if /proc does not say."""
    available = [value * 1024 for value in _entries(root / "proc/meminfo", "MemAvailable:")]
    version_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    for group in _groups(root, "memory"):
        for limit, used, cached in (("memory.max", "memory.current", "inactive_file"), version_1):
            with contextlib.suppress(OSError, ValueError):
                left = _number(group / limit) - _number(group / used)
                # The kernel gives up cached files when memory is needed.
                available.append(left + sum(_entries(group / "memory.stat", cached)))
    return max(0, min(available, default=0))


def available_tasks(root: Path = _ROOT) -> float:
    """Return how many processes and threads this process could still start."""
    available = [math.inf]
    for group in _groups(root, "pids"):
        with contextlib.suppress(OSError, ValueError):
            available.append(_number(group / "pids.max") - _number(group / "pids.current"))
    own, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if own != resource.RLIM_INFINITY and (uid := os.getuid()) != 0:  # the limit does not apply to root
        found = psutil.process_iter(["uids", "num_threads"])
        used = (
            each.info["num_threads"] or 0 for each in found if each.info["uids"] and each.info["uids"].real == uid
        )
        available.append(own - sum(used))
    return max(0, min(available))


def open_many_files() -> None:
    """Raise the soft limit of open files, so that clients cannot use up the descriptors that stages need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _groups(root: Path, controller: str) -> list[Path]:
    """Return the cgroups of this process that may limit a controller, and those that contain them. In a container,
    its own cgroup is the mount."""
    found: list[Path] = []
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                mount = root / "sys/fs/cgroup" / (controller if controllers else "")
                group = mount / path.removeprefix("/")
                found += [group, *(parent for parent in group.parents if parent.is_relative_to(mount))]
    return found


def _number(file: Path) -> int:
    return int(file.read_text())


def _entries(file: Path, name: str) -> list[int]:
    """Return the numbers in the lines of a file that begin with this name."""
    with contextlib.suppress(OSError):
        lines = (line.split() for line in file.read_text().splitlines())
        return [int(line[1]) for line in lines if line and line[0] == name]
    return []
