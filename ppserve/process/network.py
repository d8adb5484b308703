"""This host's network: its interfaces, its addresses, and the control plane's sockets."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import psutil

from ppserve.config import NetworkSettings
from ppserve.errors import ConfigError, UsageError

LOOPBACK = "127.0.0.1"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOPBACK_NAMES = ("::1", "localhost", "localhost4", "localhost6", "localhost.localdomain")

Interfaces = Mapping[str, Sequence[str]]
"""The addresses of every interface, by its name."""


@dataclass(frozen=True, slots=True)
class Route:
    """The addresses by which a stage and the head reach each other."""

    own: str
    """The stage's address."""
    head: str
    """The head's address, as the stage reached it."""


ONE_HOST = Route(LOOPBACK, LOOPBACK)


def find_route(connection: socket.socket, settings: NetworkSettings) -> Route:
    """Find the head's address, and this stage's address for other stages. Raises ConfigError for --interface."""
    if connection.family == socket.AF_UNIX:
        return ONE_HOST  # the head will say by which address stages reach each other
    own, head = (str(name[0]).partition("%")[0] for name in (connection.getsockname(), connection.getpeername()))
    if settings.advertise is not None:
        own = settings.advertise
    elif settings.interface is not None:
        own = address_of(settings.interface, interfaces(), ipaddress.ip_address(own).version)
    if not is_loopback(own) and (names := os.environ.get(GLOO_INTERFACE)):
        for name in names.split(","):
            address_of(name, interfaces(), ipaddress.ip_address(own).version, GLOO_INTERFACE)
    return Route(own, head)


@cache
def local_address() -> str:
    """Find the address by which processes of this host reach each other. Raises UsageError.

    It is tried once: an address of the loopback interface does not change, and every new epoch asks for it.
    """
    for address in (LOOPBACK, "::1"):
        # If the loopback interface is down, a program can listen on its address, but nobody can reach it.
        with (
            contextlib.suppress(OSError),
            socket.create_server((address, 0), family=family_of(address)) as listener,
            socket.create_connection(listener.getsockname()[:2], 1.0),
        ):
            return address
    raise UsageError("stages cannot reach each other: the loopback interface is down (ip link set lo up)")


def family_of(host: str) -> socket.AddressFamily:
    """Return the family of an IP address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def is_loopback(host: str) -> bool:
    """Return whether this address or name reaches only this host. Names are not resolved."""
    return host in _LOOPBACK_NAMES or host.startswith("127.")


def address_of(name: str, known: Interfaces, version: int, flag: str = "--interface") -> str:
    """Return an interface's address, if possible of this IP version. Raises ConfigError for `flag` if it has
    none."""
    found = map(ipaddress.ip_address, known.get(name, ()))
    # A link-local IPv6 address is valid only with the link's name.
    usable = [address for address in found if not address.is_link_local or address.version == 4]
    if not usable:
        names = ", ".join(sorted(name for name, own in known.items() if own))
        raise ConfigError(flag, f"{name!r} has no address here; there are {names}")
    return str(min(usable, key=lambda address: address.version != version))


def interface_of(address: str, known: Interfaces) -> str | None:
    """Return the name of the interface that has this address; None: there is none."""
    wanted = ipaddress.ip_address(address)
    return next((name for name, own in known.items() if wanted in map(ipaddress.ip_address, own)), None)


def interfaces() -> Interfaces:
    """Return the interfaces of this host."""
    internet = socket.AF_INET, socket.AF_INET6
    return {
        name: [each.address.partition("%")[0] for each in addresses if each.family in internet]
        for name, addresses in psutil.net_if_addrs().items()
    }


# ---- sockets of the control plane ----


def listen(address: str) -> socket.socket:
    """Listen at an address: @NAME, a Unix socket that has no file ("abstract" in Linux), or HOST:PORT. Raises
    OSError."""
    if not address.startswith("@"):
        return _listen_to_hosts(address)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(_abstract(address))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def connect(address: str, timeout_s: float) -> socket.socket:
    """Connect to an address as `listen` takes it. Raises OSError, also if another user listens at @NAME."""
    if not address.startswith("@"):
        connection = socket.create_connection(_host_and_port(address), timeout=timeout_s)
        prepare(connection)
        return connection
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(timeout_s)
    try:
        connection.connect(_abstract(address))
        if not is_of_this_user(connection):
            raise PermissionError(f"another user listens on {address}")
    except OSError:
        connection.close()
        raise
    return connection


def _abstract(address: str) -> str:
    return "\0" + address[1:]


def is_of_this_user(connection: socket.socket) -> bool:
    """Return whether the other end of a Unix socket belongs to this user too: every user can list and reach
    abstract names. Over TCP this is always True, because the secret decides there."""
    if connection.family != socket.AF_UNIX:
        return True
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


def prepare(connection: socket.socket) -> None:
    """Set a TCP connection's options: small frames are sent at once, and 20 s without the other host end it."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": 8, "TCP_KEEPINTVL": 4, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}
    for name, value in options.items():
        if hasattr(socket, name):  # macOS lacks some
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _listen_to_hosts(address: str) -> socket.socket:
    """Listen on the host's own address, or on all addresses if other hosts cannot reach that one."""
    host, port = _host_and_port(address)
    for family, _, _, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        # /etc/hosts often maps a host's own name to 127.0.0.1 or 127.0.1.1.
        if is_loopback(str(where[0])) and not is_loopback(host):
            continue
        with contextlib.suppress(OSError):
            return socket.create_server(where, family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
