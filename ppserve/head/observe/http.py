"""A small HTTP server for metrics and the live page: GET and HEAD only, one function per path.

Its threads never touch the engine's state: a route asks the engine for what it needs.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import NamedTuple

log = logging.getLogger(__name__)


class HttpAnswer(NamedTuple):
    """headers: added to `_HEADERS`, or replacing them."""

    content_type: str
    body: bytes
    headers: Mapping[str, str] = {}


Route = Callable[[], tuple[str, bytes] | HttpAnswer]
"""Returns an HttpAnswer, or just (content type, body)."""

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

_TEXT = "text/plain; charset=utf-8"
_MAX_CONNECTIONS = 32
_SILENT_CONNECTION_S = 10.0


class RouteServer:
    """Serves `routes` (path to Route; may grow while serving) in daemon threads until closed.

    Raises OSError when the address cannot be bound.
    """

    def __init__(self, host: str, port: int, routes: Mapping[str, Route]) -> None:
        self._server = _Server(host, port, routes)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, name="http", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, routes: Mapping[str, Route]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.routes = routes
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # HTTPServer.server_bind would look the host's name up in DNS, which may take seconds.
        TCPServer.server_bind(self)

    def verify_request(self, request: object, client_address: object) -> bool:
        """Whether fewer than _MAX_CONNECTIONS are open; otherwise the new one is closed."""
        return self._free.acquire(blocking=False)

    def process_request_thread(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        log.debug("a connection to the metrics port broke", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _SILENT_CONNECTION_S
    server_version = "ppserve"
    sys_version = ""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        route = self.server.routes.get(path)
        if route is None:
            known = ", ".join(sorted(self.server.routes))
            status, answer = HTTPStatus.NOT_FOUND, HttpAnswer(_TEXT, f"try {known}\n".encode())
        else:
            status, answer = self._run(route)
        self.send_response(status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        for name, value in {**_HEADERS, **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(answer.body)

    def _run(self, route: Route) -> tuple[HTTPStatus, HttpAnswer]:
        try:
            return HTTPStatus.OK, HttpAnswer(*route())
        except Exception:
            log.exception("%s failed", self.path)
            return HTTPStatus.INTERNAL_SERVER_ERROR, HttpAnswer(_TEXT, b"see the server's log\n")

    def log_message(self, format: str, *args: object) -> None:
        log.debug(format, *args)
