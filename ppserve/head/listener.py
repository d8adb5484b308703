"""The ports on which the head listens, and HTTP on one of them: uvicorn in the running event loop.

Its limits bound how much is held, not how long: docs/operations.md says what a proxy in front is for.
"""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from ppserve.errors import ConfigError

MAX_HEAD_BYTES = 16 << 10
_IDLE_S = 75
_CLOSING_S = 1
_BACKLOG = 1024
_SETTINGS: dict[str, Any] = {
    "ws": "none",
    "lifespan": "off",
    "interface": "asgi3",
    "log_config": None,
    "log_level": "error",
    "access_log": False,
    "proxy_headers": False,
    "server_header": False,
    "backlog": _BACKLOG,
    "h11_max_incomplete_event_size": MAX_HEAD_BYTES,
    "timeout_keep_alive": _IDLE_S,
    "timeout_graceful_shutdown": _CLOSING_S,
}


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports on which a head listens."""

    grpc: int
    http: int
    metrics: int


def bound(host: str, port: int, flag: str) -> socket.socket:
    """Raises ConfigError: `flag` for a port that it cannot have, else --host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Only with the protocol named, asyncio sends small writes at once (TCP_NODELAY).
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


class Listener:
    """Serves an ASGI application. A request's `state` holds its `transport`."""

    def __init__(self, app: ASGIApp, flag: str, max_connections: int, tls: ssl.SSLContext | None = None) -> None:
        """flag: its port's. max_connections: with as many, requests are answered with 503."""
        self._flag = flag
        config = Config(
            app,
            **_SETTINGS,
            http=_Connection,
            limit_concurrency=min(max_connections, _half_of_files()),
            ssl_context_factory=None if tls is None else lambda _config, _default: tls,
        )
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Bind and listen; return the port. Raises ConfigError when it cannot."""
        sock = bound(host, port, self._flag)
        sock.listen(_BACKLOG)
        self._serving = asyncio.create_task(self._server.serve([sock]))
        return int(sock.getsockname()[1])

    async def stop(self) -> None:
        """Accept nothing more, send complete answers, end the others."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving


def _half_of_files() -> int:
    """The rest of the files that may be open is for everything else."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


class _Server(Server):
    """uvicorn's, which leaves signals to its process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Connection(H11Protocol):
    """uvicorn's, which shows its transport: that knows the client's certificate."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {"transport": transport}
