"""Who this process is among those that torchrun started, and with whom it dies."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

EXIT_USAGE = 2
# A stage that was told to end because the server fails: not to be started again.
EXIT_FAILED = 76
# A stage that lost its head, or was told to go by a closed connection: worth starting again.
EXIT_HEAD_GONE = 75

# torchrun's own variable: seconds from its SIGTERM to the ranks until it kills them.
LAUNCHER_GRACE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_LAUNCHER_GRACE_S = 30.0


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """This process among those that torchrun started. restart: how often torchrun restarted the group."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    restart: int

    @classmethod
    def from_environ(cls) -> RankEnvironment | None:
        """None when this process was not started by torchrun."""
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return None

        def number(name: str, default: int) -> int:
            return int(os.environ.get(name, default))

        rank, world_size = number("RANK", 0), number("WORLD_SIZE", 1)
        return cls(
            rank,
            world_size,
            number("LOCAL_RANK", rank),
            number("LOCAL_WORLD_SIZE", world_size),
            number("TORCHELASTIC_RESTART_COUNT", 0),
        )


def die_with_parent(parent_pid: int | None = None) -> None:
    """Ask the kernel to kill this process when its parent (thread) ends, so that none is orphaned.

    `parent_pid`: who the parent should be; if it is gone already, this process ends at once.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(EXIT_HEAD_GONE)


def die_with_launcher() -> None:
    """In a rank: torchrun's death, even by SIGKILL, is this process's death."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()


def launcher_grace_s() -> float | None:
    """How long torchrun lets ranks go on after it was told to end; None when it is not the launcher.

    Its flag of the same meaning is not shown to ranks; the variable is.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return float(os.environ.get(LAUNCHER_GRACE, _LAUNCHER_GRACE_S))


def this_machine() -> str:
    """Equal for processes that share memory, clock and loopback: the same start of the same kernel, and the
    same network. Machines and containers may bear each other's names, so those alone do not tell."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # only Linux says
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/net")]
    return "/".join(parts)
