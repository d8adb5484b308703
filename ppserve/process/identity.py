"""A process's machine and user, which other processes compare with their own, and the name that it shows."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
from pathlib import Path

_PR_SET_NAME = 15  # Linux's number


def this_machine() -> str:
    """Return a text that is equal for processes which share a clock and a loopback interface. It is made of the
    host's name, the boot's id and the network namespace."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # only Linux has these files
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/net")]
    return "/".join(parts)


def this_user() -> str:
    """Return a text that is equal for processes of one machine which may share memory. It is made of the user's
    number, and the namespace in which the user has this number."""
    with contextlib.suppress(OSError):
        return f"{os.getuid()}/{os.readlink('/proc/self/ns/user')}"
    return str(os.getuid())


def name_process(name: str) -> None:
    """Set the name that `top` shows, of at most 15 letters. It works only on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
