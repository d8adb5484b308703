"""HTTP on one port: uvicorn in the event loop that runs already, with its own limits.

They bound how much is held, not for how long: docs/operations.md says what a proxy in front is for.
"""

from __future__ import annotations

import asyncio
import resource
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from ppserve.head.binding import bound

MAX_HEAD_BYTES = 16 << 10
_IDLE_S = 75
_CLOSING_S = 1
_BACKLOG = 1024


class Listener:
    """Serves an ASGI application. Each request's `state` holds its connection's `transport`."""

    def __init__(self, app: ASGIApp, max_connections: int, tls: ssl.SSLContext | None = None) -> None:
        """max_connections: while there are as many, requests are answered with 503."""
        self._server = _Server(
            Config(
                app,
                http=_Connection,
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                log_level="error",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=_BACKLOG,
                limit_concurrency=min(max_connections, _half_of_files()),
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                timeout_keep_alive=_IDLE_S,
                timeout_graceful_shutdown=_CLOSING_S,
                ssl_context_factory=None if tls is None else lambda _config, _default: tls,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int, flag: str) -> int:
        """Bind and listen; return the port. Raises ConfigError for `flag` when the address cannot be bound."""
        sock = bound(host, port, flag)
        sock.listen(_BACKLOG)
        self._serving = asyncio.create_task(self._server.serve([sock]))
        return int(sock.getsockname()[1])

    async def stop(self) -> None:
        """Accept nothing more, let answers that are complete leave, and end the others."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving


def _half_of_files() -> int:
    """Of those that may be open; the rest is left to everything else."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


class _Server(Server):
    """uvicorn's, which leaves signals to the process that it runs in."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Connection(H11Protocol):
    """uvicorn's, which shows its transport to the application: the client's certificate is known there alone."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {"transport": transport}
