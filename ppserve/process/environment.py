"""This process among those that torchrun started: rank, exit codes, signals and limits."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ppserve.errors import LauncherError

EXIT_USAGE = 2
# The stage lost the head: its keeper restarts it.
EXIT_HEAD_GONE = 75
# The head told the stage to end because the server fails: no restart.
EXIT_FAILED = 76

# torchrun's variable: seconds from its SIGTERM to its SIGKILL.
LAUNCHER_GRACE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"

# Enough for all; programs that close every possible descriptor stay fast.
_OPEN_FILES = 65_536

# Linux's numbers.
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15

# They go to all ranks and must not end one; the head installs handlers later.
HEAD_SIGNALS = (signal.SIGHUP, signal.SIGUSR1)
# In a child whose parent decides when it ends.
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, *HEAD_SIGNALS)


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """What torchrun tells a rank."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def from_environ(cls) -> RankEnvironment | None:
        """None when torchrun did not start this process. Raises LauncherError."""
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return None
        rank = number_of("RANK")
        world_size = number_of("WORLD_SIZE", least=1)
        if rank >= world_size:
            raise LauncherError(f"RANK: {rank} is not one of {world_size}, from 0 on (WORLD_SIZE)")
        local_rank = number_of("LOCAL_RANK", rank)
        return cls(rank, world_size, local_rank, number_of("LOCAL_WORLD_SIZE", world_size, least=1))


def number_of(variable: str, unset: int = 0, least: int = 0) -> int:
    """A variable's value. Raises LauncherError unless it is a number from `least` on."""
    value = os.environ.get(variable, str(unset))
    if value.isdecimal() and int(value) >= least:
        return int(value)
    raise LauncherError(f"{variable}: {value!r} is not a whole number from {least} on")


def die_with_parent(parent_pid: int | None = None) -> None:
    """Ends this process with the thread that started it, at once if `parent_pid` has. Only on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(EXIT_HEAD_GONE)


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """A child started in the block gets no signal until it calls `ignore_signals`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals(signals: Sequence[signal.Signals]) -> None:
    """Also those that `signals_blocked` holds back."""
    for signum in signals:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def name_process(name: str) -> None:
    """Sets the name that `top` shows, at most 15 letters. Only on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def die_with_launcher() -> None:
    """Have the kernel end this rank when torchrun dies, even by SIGKILL."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()


def open_many_files() -> None:
    """Raises the soft limit of open files: clients must not take a stage's descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def this_machine() -> str:
    """Equal where clock and loopback are: name, boot id, network namespace."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # only Linux has these files
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/net")]
    return "/".join(parts)


def this_user() -> str:
    """Equal for processes of a machine that may share memory: the user, as this container numbers it."""
    with contextlib.suppress(OSError):
        return f"{os.getuid()}/{os.readlink('/proc/self/ns/user')}"
    return str(os.getuid())
