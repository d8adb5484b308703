"""Which TCP ports this process listens on, and whether it meant to. A library that opens one is found out here."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ppserve.errors import UsageError

_LISTENING = "0A"


@dataclass(frozen=True, slots=True, order=True)
class OpenPort:
    """host: an address, :: or 0.0.0.0 for all of them."""

    host: str
    port: int

    @property
    def is_local(self) -> bool:
        """Whether only this host can reach it."""
        address = ipaddress.ip_address(self.host)
        mapped = getattr(address, "ipv4_mapped", None)
        return bool((mapped or address).is_loopback)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def own_ports() -> list[OpenPort]:
    """The ports that this process listens on, in order. Empty where the system does not tell: only Linux has these
    files."""
    inodes = set[str]()
    for entry in _entries("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed the directory is closed by now
            if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry)):
                inodes.add(match[1])
    found = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENING and words[9] in inodes:
                    found.append(_open_port(words[1]))
    return sorted(found)


def refuse_unmeant(meant: Mapping[int, bool]) -> list[OpenPort]:
    """What this process listens on. meant: of each port whether other hosts may reach it. Raises UsageError."""
    found = own_ports()
    for opened in found:
        if opened.port not in meant:
            raise UsageError(f"this process listens on {opened}, which nothing asked for")
        if not meant[opened.port] and not opened.is_local:
            raise UsageError(f"this process listens on {opened}, but is to serve this host alone")
    return found


def ports_elsewhere(address: str) -> list[OpenPort]:
    """What this process listens on, neither for this host alone nor on `address`."""
    return [opened for opened in own_ports() if not opened.is_local and opened.host != address]


def _entries(directory: str) -> list[str]:
    try:
        return [f"{directory}/{name}" for name in os.listdir(directory)]
    except OSError:
        return []


def _open_port(written: str) -> OpenPort:
    """The kernel writes addresses as words of 32 bits in the machine's order, in hexadecimal."""
    address, port = written.split(":")
    words = [int(address[i : i + 8], 16).to_bytes(4, "little") for i in range(0, len(address), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return OpenPort(socket.inet_ntop(family, b"".join(words)), int(port, 16))
