"""The network interfaces of this host, and the address by which other hosts reach this process."""

from __future__ import annotations

import ctypes
import ipaddress
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ppserve.config import NetworkSettings
from ppserve.errors import ConfigError

LOOPBACK = "127.0.0.1"
# The first and the last of the ports that the system gives those who ask for any.
_LOCAL_PORTS = "/proc/sys/net/ipv4/ip_local_port_range"


@dataclass(frozen=True, slots=True)
class Interface:
    """An address of an interface."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class Route:
    """How a stage and the head reach each other. own: the stage's address. head: where it found the head."""

    own: str
    head: str


ONE_HOST = Route(LOOPBACK, LOOPBACK)


def find_route(connection: socket.socket, settings: NetworkSettings) -> Route:
    """From a stage's connection to the head: the address by which it reaches the head, the others can reach it by.

    Raises ConfigError if --interface names none.
    """
    if connection.family == socket.AF_UNIX:
        return ONE_HOST
    own, head = (str(name[0]).partition("%")[0] for name in (connection.getsockname(), connection.getpeername()))
    if settings.advertise is not None:
        own = settings.advertise
    elif settings.interface is not None:
        own = address_of(settings.interface, interfaces(), ipaddress.ip_address(own).version)
    return Route(own, head)


def other_ports(ports: tuple[int, int] | None) -> str | None:
    """Why stages will listen on others than --stage-ports; None if they will not. gloo and NCCL take ports from
    the system and cannot be told which."""
    if ports is None:
        return None
    try:
        first, last = map(int, Path(_LOCAL_PORTS).read_text().split())
    except (OSError, ValueError):
        return "--stage-ports: gloo and NCCL take any port"
    if ports[0] <= first and last <= ports[1]:
        return None
    return f"--stage-ports: gloo and NCCL take any of {first}-{last}; set net.ipv4.ip_local_port_range"


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def address_of(name: str, known: Sequence[Interface], version: int) -> str:
    """An address of the interface, of this version of IP if it has one. Raises ConfigError."""
    found = [ipaddress.ip_address(one.address) for one in known if one.name == name]
    # An address that only its own link understands needs the link's name with it.
    usable = [address for address in found if not address.is_link_local or address.version == 4]
    if not usable:
        names = ", ".join(sorted({one.name for one in known}))
        raise ConfigError("--interface", f"{name!r} has no address here; there are {names}")
    return str(min(usable, key=lambda address: address.version != version))


def interface_of(address: str, known: Sequence[Interface]) -> str | None:
    """The name of the interface that has this address."""
    wanted = ipaddress.ip_address(address)
    return next((one.name for one in known if ipaddress.ip_address(one.address) == wanted), None)


class _Node(ctypes.Structure):
    """The beginning of Linux's `struct ifaddrs`."""


_Node._fields_ = [
    ("next", ctypes.POINTER(_Node)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def interfaces() -> tuple[Interface, ...]:
    """Every address of every interface, as getifaddrs(3) lists them. None where the system is not Linux."""
    if sys.platform != "linux":
        return ()
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Node)()
    if libc.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), "getifaddrs")
    found: list[Interface] = []
    try:
        node = first
        while node:
            if address := _read_address(node.contents.address):
                found.append(Interface(node.contents.name.decode(), address))
            node = node.contents.next
    finally:
        libc.freeifaddrs(first)
    return tuple(found)


def _read_address(where: int | None) -> str | None:
    """A `struct sockaddr` of IP; None for other kinds."""
    if not where:
        return None
    (family,) = struct.unpack("=H", ctypes.string_at(where, 2))
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, ctypes.string_at(where + 4, 4))
    if family == socket.AF_INET6:
        return socket.inet_ntop(socket.AF_INET6, ctypes.string_at(where + 8, 16))
    return None
