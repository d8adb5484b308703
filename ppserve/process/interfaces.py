"""The network interfaces of this host, and the address by which other hosts reach this process."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from ppserve.config import NetworkSettings
from ppserve.errors import ConfigError

LOOPBACK = "127.0.0.1"


Interfaces = Mapping[str, Sequence[str]]
"""The addresses of every interface, by its name."""


@dataclass(frozen=True, slots=True)
class Route:
    """How a stage and the head reach each other."""

    own: str
    """The stage's address."""
    head: str
    """Where the stage found the head."""


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


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def address_of(name: str, known: Interfaces, version: int) -> str:
    """An address of the interface, of this version of IP if it has one. Raises ConfigError."""
    found = map(ipaddress.ip_address, known.get(name, ()))
    # A link-local IPv6 address is only valid together with the link's name.
    usable = [address for address in found if not address.is_link_local or address.version == 4]
    if not usable:
        names = ", ".join(sorted(name for name, own in known.items() if own))
        raise ConfigError("--interface", f"{name!r} has no address here; there are {names}")
    return str(min(usable, key=lambda address: address.version != version))


def interface_of(address: str, known: Interfaces) -> str | None:
    """The name of the interface that has this address."""
    wanted = ipaddress.ip_address(address)
    return next((name for name, own in known.items() if wanted in map(ipaddress.ip_address, own)), None)


def interfaces() -> Interfaces:
    """Of this host."""
    internet = socket.AF_INET, socket.AF_INET6
    return {
        name: [each.address.partition("%")[0] for each in addresses if each.family in internet]
        for name, addresses in psutil.net_if_addrs().items()
    }
