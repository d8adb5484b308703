"""HTTP on one port: uvicorn's protocol in the event loop that runs already, with the bounds that it lacks.

uvicorn bounds the size of a request's head, but neither how many connections there are, nor how long one may take
to send a head, nor how long an answer may wait for its reader. Bodies and streams are the application's to bound.
"""

from __future__ import annotations

import asyncio
import math
import resource
import ssl
import sys
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

import h11
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from ppserve.head.binding import bound

_BACKLOG = 1024
_TLS_WITHIN_S = 10
_CLOSING_S = 1.0

Headers = Sequence[tuple[bytes, bytes]]
Refuse = Callable[[int], tuple[Headers, bytes]]
"""The headers and the body of the answer to bytes that are no request; given its status, 400 or 431."""


def refuse_plainly(status: int) -> tuple[Headers, bytes]:
    """For those who look at pages."""
    why = b"the head of this request is too long\n" if status == 431 else b"this is no HTTP request\n"
    return [(b"content-type", b"text/plain; charset=utf-8")], why


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one listener. connections: at most. When one more comes, the one that has waited longest for a request is
    closed; where none waits, the one whose reader has taken nothing for longest; where all read, the new one. And
    a request that comes while there are as many is its connection's last; the head of its answer says so.
    head_within_s: from the connection to the end of its first request's head. idle_s: from one answer to the end
    of the next request's head. unread_s: how long a connection's full buffer may wait for its reader."""

    connections: int = 2048
    head_bytes: int = 16 << 10
    head_within_s: float = 10.0
    idle_s: float = 75.0
    unread_s: float = 45.0


class Listener:
    """Serves an ASGI application. Its `scope["state"]` holds `certificate`, the client's in DER or b"", and
    `abort`, which ends the connection without waiting for its reader."""

    def __init__(
        self,
        app: Any,
        bounds: Bounds | None = None,
        tls: ssl.SSLContext | None = None,
        refuse: Refuse = refuse_plainly,
    ) -> None:
        bounds = bounds or Bounds()
        self._config = Config(
            app,
            interface="asgi3",
            lifespan="off",
            ws="none",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            h11_max_incomplete_event_size=bounds.head_bytes,
        )
        self._config.load()
        self._state = _State(bounds, refuse)
        self._tls = tls
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int, flag: str) -> int:
        """Bind and listen; return the port. Raises ConfigError for `flag` when the address cannot be bound."""
        sock = bound(host, port, flag)
        self._server = await asyncio.get_running_loop().create_server(self._made, sock=sock, backlog=_BACKLOG)
        return int(sock.getsockname()[1])

    def _made(self) -> asyncio.BaseProtocol:
        connection = _Connection(self._config, self._state)
        return connection if self._tls is None else _Handshake(connection, self._state, self._tls)

    async def stop(self) -> None:
        """Accept nothing more, let answers that are complete leave, and end all connections."""
        if self._server is None:
            return
        self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            await asyncio.wait(list(self._state.tasks), timeout=_CLOSING_S)
        for task in list(self._state.tasks):
            task.cancel()
        for handshake in list(self._state.handshakes):
            handshake.end()
        for connection in list(self._state.connections):
            connection.transport.abort()  # first: a task that was cancelled may still wait for a reader
        if self._state.tasks:
            await asyncio.wait(list(self._state.tasks))


class _State(ServerState):
    """What all connections of a listener share. handshakes: those that are no connections yet. waiting:
    handshakes, and connections without a request, longest first. unread: connections whose readers are behind,
    longest first."""

    def __init__(self, bounds: Bounds, refuse: Refuse) -> None:
        super().__init__()
        self.bounds = bounds
        self.refuse = refuse
        # Half of the files that may be open are left to everything else.
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.max_connections = min(bounds.connections, files // 2)
        self.handshakes: set[_Handshake] = set()
        self.waiting: dict[_Connection | _Handshake, None] = {}
        self.unread: dict[_Connection, None] = {}

    @property
    def num_free(self) -> int:
        """Below 0: too many have come."""
        return self.max_connections - len(self.connections) - len(self.handshakes)

    def make_room(self, new_client: _Connection | _Handshake) -> None:
        """One has come: there may be one too many."""
        if self.num_free < 0:
            next(iter((*self.waiting, *self.unread, new_client))).end()


class _Handshake(SSLProtocol):
    """asyncio's, which counts as a connection from the first: each holds one of the process's descriptors."""

    def __init__(self, connection: _Connection, state: _State, tls: ssl.SSLContext) -> None:
        settings: dict[str, Any] = {"waiter": None, "ssl_handshake_timeout": _TLS_WITHIN_S}
        super().__init__(asyncio.get_running_loop(), connection, tls, server_side=True, **settings)
        connection.on_made = self._is_over
        self._shared = state

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._raw = transport
        self._shared.handshakes.add(self)
        self._shared.make_room(self)
        if self in self._shared.handshakes:
            self._shared.waiting[self] = None
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._is_over()
        super().connection_lost(exc)

    def end(self) -> None:
        self._is_over()
        self._raw.abort()

    def _is_over(self) -> None:
        self._shared.handshakes.discard(self)
        self._shared.waiting.pop(self, None)


class _Connection(H11Protocol):
    """uvicorn's connection, which waits for a request, and for a reader, only so long."""

    def __init__(self, config: Config, state: _State) -> None:
        super().__init__(config, state, {})
        # uvicorn's own timer stops at the first byte of a request; this one at the end of its head.
        self.timeout_keep_alive = 2 * math.ceil(state.bounds.idle_s)
        self._state = state
        self.on_made: Callable[[], object] = lambda: None
        self._timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.on_made()
        super().connection_made(transport)
        tls = transport.get_extra_info("ssl_object")
        certificate = tls.getpeercert(binary_form=True) if tls is not None else None
        self.app_state = {"certificate": certificate or b"", "abort": transport.abort}
        self._state.make_room(self)
        self._wait(self._state.bounds.head_within_s)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._stop_waiting_if_asked()

    def handle_events(self) -> None:
        """uvicorn takes the next request here. A connection that ended with an answer whose head did not say so
        would lose the request that its client sends meanwhile."""
        last = [(b"connection", b"close")] if self._state.num_free <= 0 else []
        self._state.default_headers = [(b"date", formatdate(usegmt=True).encode()), *last]
        super().handle_events()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this where it meets bytes that are no request, or no body."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()  # the body of a request that has its answer already
            return
        status = 431 if getattr(sys.exception(), "error_status_hint", 400) == 431 else 400
        headers, body = self._state.refuse(status)
        if self.cycle is not None and not self.cycle.response_complete:
            # The application was asked already, with the bytes before: nobody hears its answer.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            body = b"" if self.cycle.scope["method"] == "HEAD" else body
        lengths = [(b"content-length", str(len(body)).encode()), (b"connection", b"close")]
        reason = HTTPStatus(status).phrase.encode()
        for event in (
            h11.Response(status_code=status, headers=[*headers, *lengths], reason=reason),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self._wait(self._state.bounds.idle_s)  # the answer may not leave, if nobody reads it
        self.transport.close()

    def on_response_complete(self) -> None:
        self._wait(self._state.bounds.idle_s)
        super().on_response_complete()
        self._stop_waiting_if_asked()  # a request may have come before the last one was answered

    def pause_writing(self) -> None:
        super().pause_writing()
        self._state.unread[self] = None
        self._unread_timer = self.loop.call_later(self._state.bounds.unread_s, self.end)

    def resume_writing(self) -> None:
        self._stop_unread()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_unread()
        super().connection_lost(exc)

    def _wait(self, seconds: float) -> None:
        self._stop_waiting()
        self._state.waiting[self] = None
        self._timer = self.loop.call_later(seconds, self.end)

    def end(self) -> None:
        self._stop_waiting()
        self._stop_unread()
        self.transport.abort()

    def _stop_unread(self) -> None:
        self._state.unread.pop(self, None)
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _stop_waiting_if_asked(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()

    def _stop_waiting(self) -> None:
        self._state.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
