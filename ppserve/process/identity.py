"""Which machine and which user a process runs on and as, for other processes to compare, and the name it shows."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
from pathlib import Path

_PR_SET_NAME = 15  # Linux's number


def this_machine() -> str:
    """Return what is equal for processes that share clock and loopback: host name, boot id, network namespace."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # only Linux has these files
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/net")]
    return "/".join(parts)


def this_user() -> str:
    """Return what is equal for processes of one machine that may share memory: the user, and the namespace of
    users in which it has that number."""
    with contextlib.suppress(OSError):
        return f"{os.getuid()}/{os.readlink('/proc/self/ns/user')}"
    return str(os.getuid())


def name_process(name: str) -> None:
    """Set the name that `top` shows, at most 15 letters. Only on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
