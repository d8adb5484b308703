"""Sockets of the control plane: where the head listens, and how a rank reaches it."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket

from ppserve.process.interfaces import is_loopback
from ppserve.wire import Address, TcpAddress


def listen(address: Address) -> socket.socket:
    """Raises OSError. A path is taken over: it may be a killed head's."""
    if isinstance(address, TcpAddress):
        return _listen_to_hosts(address)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(address.path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address.path)
    listener.listen()
    return listener


def connect(address: Address, timeout_s: float) -> socket.socket:
    """Raises OSError."""
    if isinstance(address, TcpAddress):
        connection = socket.create_connection((address.host, address.port), timeout=timeout_s)
        prepare(connection)
        return connection
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(timeout_s)
    try:
        connection.connect(address.path)
    except OSError:
        connection.close()
        raise
    return connection


def prepare(connection: socket.socket) -> None:
    """For the control plane. Frames are small, and somebody waits for each. A host that is gone without a word is
    found out by the kernel as well: after 20 s without an answer, whether data or nothing was to be sent."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": 8, "TCP_KEEPINTVL": 4, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}
    for name, value in options.items():
        if hasattr(socket, name):  # not every system has them all
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def answers(address: Address) -> bool:
    """Whether anybody listens there."""
    try:
        connect(address, timeout_s=1.0).close()
    except OSError:
        return False
    return True


def _listen_to_hosts(address: TcpAddress) -> socket.socket:
    """On the one address that the host's name means here; on all, where it means none that others could reach."""
    for family, _, _, _, where in socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM):
        # A host's own name often means 127.0.0.1 or 127.0.1.1 to the host itself, and to nobody else.
        if is_loopback(str(where[0]).partition("%")[0]) and not _means_this_host_alone(address.host):
            continue
        with contextlib.suppress(OSError):
            return socket.create_server(where, family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", address.port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", address.port))


def _means_this_host_alone(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"
