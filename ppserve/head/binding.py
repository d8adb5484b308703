"""Where the head listens: sockets of the addresses that the operator names, or why they cannot be had."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass

from ppserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports on which a head listens."""

    grpc: int
    http: int
    metrics: int


def bound(host: str, port: int, flag: str) -> socket.socket:
    """Raises ConfigError: of `flag` for a port that is taken or not allowed, else of --host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named: asyncio sends small writes at once (TCP_NODELAY) only then.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        at_fault = flag if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        why = (error.strerror or "").lower()
        raise ConfigError(at_fault, f"cannot listen on {address_text(host, port)}: {why}") from error
    return sock


def address_text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
