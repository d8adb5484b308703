"""This process among those that torchrun started: its rank, its exit codes, and which parent's death ends it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ppserve.errors import LauncherError

EXIT_USAGE = 2
# The stage lost its connection to the head: its keeper restarts it.
EXIT_HEAD_GONE = 75
# The head told the stage to end because the server fails: its keeper does not restart it.
EXIT_FAILED = 76
# The head asked the stage for a new process: its keeper starts one, and counts no death.
EXIT_RESTART = 77

# torchrun's own variable: seconds between its SIGTERM and its SIGKILL to the ranks.
LAUNCHER_GRACE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_LAUNCHER_GRACE_S = 30

# Enough for every connection that the head accepts. Some programs that a stage may start try to close every
# descriptor that they could have.
_OPEN_FILES = 65_536

_FOR_THE_HEAD = (signal.SIGHUP, signal.SIGUSR1)
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, *_FOR_THE_HEAD)


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """What torchrun tells a rank."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def from_environ(cls) -> RankEnvironment | None:
        """None when this process was not started by torchrun. Raises LauncherError."""
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return None
        rank, world_size = number_of("RANK"), number_of("WORLD_SIZE", least=1)
        if rank >= world_size:
            raise LauncherError(f"RANK: {rank} is not one of {world_size}, from 0 on (WORLD_SIZE)")
        local_rank = number_of("LOCAL_RANK", rank)
        return cls(rank, world_size, local_rank, number_of("LOCAL_WORLD_SIZE", world_size, least=1))


def number_of(variable: str, unset: int = 0, least: int = 0) -> int:
    """What an environment variable says. Raises LauncherError unless that is a whole number of at least this."""
    said = os.environ.get(variable, str(unset))
    if said.isdecimal() and int(said) >= least:
        return int(said)
    raise LauncherError(f"{variable}: {said!r} is not a whole number from {least} on")


def die_with_parent(parent_pid: int | None = None) -> None:
    """Asks the kernel to kill this process when its parent ends, so that none is orphaned. Only on Linux.

    Strictly when the thread ends that started it. parent_pid: if the parent is another process by now, this
    process ends at once.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(EXIT_HEAD_GONE)


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """A child that is started in the block hears no signal that would end it until `ignore_ending`: it may import
    for seconds before. Ctrl-C in a terminal goes to all processes, and a supervisor's SIGTERM may."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_ending() -> None:
    """In such a child: others decide when it ends."""
    for signum in _ENDING_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING_SIGNALS)


def ignore_what_is_for_the_head() -> None:
    """In every rank: the head hears them once it serves. Sent to all ranks, they must not end one."""
    for signum in _FOR_THE_HEAD:
        signal.signal(signum, signal.SIG_IGN)


def name_process(name: str) -> None:
    """What `top` shows for this process, at most 15 letters. Only on Linux."""
    if sys.platform == "linux":
        pr_set_name = 15
        ctypes.CDLL(None).prctl(pr_set_name, name.encode(), 0, 0, 0)


def die_with_launcher() -> None:
    """In a rank: when torchrun dies, even by SIGKILL, the kernel kills this process."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()


def open_many_files() -> None:
    """Raises the soft limit of open files, often 1024, to the hard one or 65,536: connections of clients must not
    take the descriptors that are needed to replace a stage. Child processes inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def launcher_grace_s() -> float | None:
    """Seconds that torchrun gives its ranks to end; None when another launcher started this process.

    Read from the environment variable: ranks cannot see torchrun's flag of the same meaning. Raises LauncherError.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return number_of(LAUNCHER_GRACE, _LAUNCHER_GRACE_S)


def this_machine() -> str:
    """Equal for processes that share memory, clock and loopback: made of the kernel's boot id, the network
    namespace and the host's name. Names alone do not tell machines and containers apart."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # only Linux has these files
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/net")]
    return "/".join(parts)
