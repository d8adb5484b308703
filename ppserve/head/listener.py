"""The ports on which the head listens, and HTTP on one of them: uvicorn in the running event loop.

Limits bound how many connections and bytes it holds, and not for how long it holds them: docs/security.md says
what a proxy in front is for. A client may end its side of a connection once it has asked.
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
from functools import partial
from typing import Any

from starlette.types import ASGIApp
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from ppserve.errors import ConfigError

MAX_HEAD_BYTES = 16 << 10
_IDLE_S = 75
_CLOSING_S = 1
# How often a client that ended its side is looked for. Every so many times it is sent an interim answer, which
# clients skip: if it has closed the connection, its host answers with a reset.
_LOOK_S, _LOOKS_PER_SIGN = 0.5, 4
_SIGN = b"HTTP/1.1 100 Continue\r\n\r\n"
# HTTP/1.0 has no interim answers. So this host asks the client's, every so many seconds, without a byte that the
# client would see. A host that has forgotten the closed connection, Linux's within a minute, answers with a reset.
_PROBES = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2}
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
    """Return a socket that is bound to this address.

    Raises ConfigError, which names `flag` if the port is taken or forbidden, and --host otherwise.
    """
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
    """Serves an ASGI application.

    A request's `state` holds the `transport` of its connection, and `is_surplus`: whether the connection is one
    too many, so that the application must answer that there are too many.
    """

    def __init__(self, app: ASGIApp, flag: str, max_connections: int, tls: ssl.SSLContext | None = None) -> None:
        """flag: the one that sets its port; errors name it."""
        self._flag = flag
        self.max_connections = min(max_connections, _half_of_files())
        self.idle: dict[_Connection, None] = {}
        """The connections without a request, the longest first."""
        config = Config(
            app,
            **_SETTINGS,
            http=partial(_Connection, self),  # type: ignore[arg-type]  # it makes one, as a class does
            ssl_context_factory=None if tls is None else lambda _config, _default: tls,
        )
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    def malformed(self) -> tuple[str, bytes]:
        """Return the type and the content of the answer to bytes that are no request."""
        return "text/plain", b"not a request of HTTP\n"

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
    """Return half of the number of files that may be open. The other half is for everything else."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


class _Server(Server):
    """uvicorn's server. It leaves signals to its process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Connection(H11Protocol):
    """uvicorn's connection. It gives way to new ones when it is idle, and outlives the end of the client's
    side."""

    def __init__(self, listener: Listener, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._listener = listener
        self._is_half_closed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        idle = self._listener.idle
        # A connection whose client has not read its last answer is kept, and counted: closing it would wait for
        # that.
        read = (each for each in idle if not each.transport.get_write_buffer_size())
        if self._are_too_many() and (longest := next(read, None)) is not None:
            del idle[longest]
            self.connections.discard(longest)
            longest.shutdown()
        idle[self] = None
        self.app_state = {"transport": transport, "is_surplus": self._are_too_many()}

    def _are_too_many(self) -> bool:
        return len(self.connections) > self._listener.max_connections

    def data_received(self, data: bytes) -> None:
        self._listener.idle.pop(self, None)
        self.app_state["is_surplus"] &= self._are_too_many()
        super().data_received(data)

    def on_response_complete(self) -> None:
        super().on_response_complete()  # begins the next of requests that came together
        if self._is_answering():
            return
        if self._is_half_closed:
            self.transport.close()
        elif not self.transport.is_closing():
            self._listener.idle[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._listener.idle.pop(self, None)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no request. In the middle of an answer there is nothing to say."""
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            kind, content = self._listener.malformed()
            head = f"content-type: {kind}\r\ncontent-length: {len(content)}\r\nconnection: close\r\n\r\n"
            self.transport.write(b"HTTP/1.1 400 Bad Request\r\n" + head.encode() + content)
        self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection for the answers to complete requests. TLS has no half that could stay open."""
        if self.scheme == "http" and self._is_answering() and not self._is_half_closed:
            self._is_half_closed = True
            _probe(self.transport.get_extra_info("socket"))
            self._look_for_client(1)
        return self._is_half_closed

    def _is_answering(self) -> bool:
        """Whether a request was read to its end, and its answer was not sent to its end."""
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body

    def _look_for_client(self, count: int) -> None:
        """Close the connection if the client is gone; if not, look again later.

        A client that has closed the whole connection looks like one that has ended its side.
        """
        if self.transport.is_closing() or not self._is_answering():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        may_be_sent = not self.cycle.response_started and self.scope["http_version"] == "1.1"
        if count % _LOOKS_PER_SIGN == 0 and may_be_sent:
            self.transport.write(_SIGN)
        self.loop.call_later(_LOOK_S, self._look_for_client, count + 1)


def _probe(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in _PROBES.items():
        if (option := getattr(socket, name, None)) is not None:  # not every system has them
            sock.setsockopt(socket.IPPROTO_TCP, option, seconds)
