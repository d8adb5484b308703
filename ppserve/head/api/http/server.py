"""The HTTP server: paths, keys, time limits, and errors as answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from http import HTTPStatus
from typing import NoReturn, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ppserve.config import ServerSettings
from ppserve.errors import DeadlinePassed, Draining
from ppserve.head.api.call import Call
from ppserve.head.api.http import describing
from ppserve.head.api.http.chat import ChatTemplate, chat_completions
from ppserve.head.api.http.exchange import Exchange
from ppserve.head.api.http.failures import HttpError, content_of
from ppserve.head.api.http.generating import completions
from ppserve.head.api.request_handler import RequestHandler
from ppserve.head.api.tls import Certificates, LiveContext, read_certificates
from ppserve.head.listener import Bounds, Headers, Listener

log = logging.getLogger(__name__)

BOUNDS = Bounds()
OPEN_PATHS = ("/health",)
# The caller hung up before it was answered: nginx's number.
_CALLER_GONE = 499

STATUSES = (200, 400, 401, 404, 405, 408, 413, 429, 431, _CALLER_GONE, 500, 503, 504)
OTHER_PATHS = "other"

Endpoint = Callable[[Exchange, RequestHandler], Awaitable[None]]


class AnswerCounts(Protocol):
    """Is told of every answer. path: one of those that are served, or OTHER_PATHS."""

    def http_expected(self, path: str, statuses: Iterable[int]) -> None:
        """Answers with these statuses may come: their counts begin at zero."""

    def http_answered(self, path: str, status: int) -> None:
        """An answer was sent, or its caller had hung up."""


class HttpServer:
    """Serves until `stop`. Not healthy until told that it is serving."""

    def __init__(self, settings: ServerSettings, request_handler: RequestHandler, counts: AnswerCounts) -> None:
        """Raises ConfigError for certificates and a chat template that cannot be used."""
        self._settings = settings
        template = ChatTemplate(settings.chat_template) if settings.chat_template else None
        self._request_handler = request_handler
        self._is_serving = False
        endpoints: list[tuple[str, str, Endpoint]] = [
            ("POST", "/v1/completions", completions),
            ("POST", "/v1/chat/completions", partial(chat_completions, template)),
            ("GET", "/v1/models", describing.models),
            ("GET", "/v1/models/{name}", describing.model),
            ("GET", "/health", self._health),
            ("GET", "/version", describing.version),
            ("GET", "/tokenizer_info", partial(describing.tokenizer_info, template.source if template else None)),
            ("POST", "/tokenize", describing.tokenize),
            ("POST", "/detokenize", describing.detokenize),
        ]
        paths = frozenset(path for _, path, _ in endpoints if "{" not in path)
        for path in (*paths, OTHER_PATHS):
            counts.http_expected(path, STATUSES)
        routes = [
            Route(path, _Serving(endpoint, request_handler), methods=[method])
            for method, path, endpoint in endpoints
        ]
        app = Starlette(
            routes=routes,
            middleware=[Middleware(_Gate, request_handler, counts, paths)],
            exception_handlers={HTTPException: _no_such_path},
        )
        # Not sent elsewhere: an address made of the caller's own Host header may be anybody's.
        app.router.redirect_slashes = False
        certificates = read_certificates(settings)
        self._counts = counts
        self._tls = LiveContext(certificates) if certificates else None
        context = self._tls.context if self._tls else None
        self._listener = Listener(app, BOUNDS, context, self._refuse)

    async def start(self) -> int:
        """Bind and listen; return the port. Raises ConfigError when the address cannot be bound."""
        return await self._listener.start(self._settings.host, self._settings.http_port, "--http-port")

    def show(self, certificates: Certificates) -> None:
        """To new connections, from now on; those that stand keep theirs."""
        if self._tls is not None:
            self._tls.show(certificates)

    async def set_serving(self, serving: bool) -> None:
        """What /health says."""
        self._is_serving = serving

    async def stop(self, timeout_s: float) -> None:
        """Turn unhealthy at once, refuse new requests, let running ones finish for `timeout_s`, then close."""
        self._is_serving = False
        await self._request_handler.drain(timeout_s)
        await self._listener.stop()

    async def _health(self, exchange: Exchange, _request_handler: RequestHandler) -> None:
        if not self._is_serving:
            raise Draining("not serving: a stage is away, or the server is shutting down")
        await exchange.answer(b"{}")

    def _refuse(self, status: int) -> tuple[Headers, bytes]:
        """The answer to bytes that are no request, so that nobody knows whose they are."""
        error = HttpError(400, "NO_HTTP", "this is no HTTP request, or one whose headers contradict each other")
        if status == 431:
            error = _head_too_long()
        call = Call.begin("", None, None)
        call.refusal(error)
        self._counts.http_answered(OTHER_PATHS, error.code)
        names = [(name.encode(), value.encode()) for name, value in call.names]
        return [(b"content-type", b"application/json"), *names], content_of(error)


class _Serving:
    """An endpoint as ASGI."""

    def __init__(self, endpoint: Endpoint, request_handler: RequestHandler) -> None:
        self._endpoint = endpoint
        self._request_handler = request_handler

    async def __call__(self, scope: Scope, _receive: Receive, _send: Send) -> None:
        await self._endpoint(scope["state"]["exchange"], self._request_handler)


class _Gate:
    """Stands before every path, also those that there are not: whoever has no key does not learn which."""

    def __init__(
        self, app: ASGIApp, request_handler: RequestHandler, counts: AnswerCounts, paths: frozenset[str]
    ) -> None:
        self._app = app
        self._request_handler = request_handler
        self._counts = counts
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._request_handler)
        scope["state"]["exchange"] = exchange
        try:
            await self._answer(exchange, scope, receive)
        except asyncio.CancelledError:
            # The caller hung up, stopped reading, or the server closes: nobody reads the rest.
            log.debug("request %s: ended before its answer", exchange.call.request_id, extra=exchange.call.trace)
            exchange.abort()
        path = scope["path"] if scope["path"] in self._paths else OTHER_PATHS
        self._counts.http_answered(path, exchange.status or _CALLER_GONE)

    async def _answer(self, exchange: Exchange, scope: Scope, receive: Receive) -> None:
        try:
            # The listener has refused it unless all of it came at once.
            if sum(len(name) + len(value) for name, value in scope["headers"]) > BOUNDS.head_bytes:
                raise _head_too_long()
            if self._request_handler.keys is not None and scope["path"] not in OPEN_PATHS:
                self._request_handler.keys.check(exchange.key)
            try:
                async with exchange.limited() as limit:
                    await self._app(scope, receive, exchange.send)
            except TimeoutError:
                if not limit.expired():
                    raise
                raise DeadlinePassed("the caller's time limit passed") from None
        except Exception as error:
            await exchange.fail(exchange.call.refusal(error))


def _head_too_long() -> HttpError:
    return HttpError(431, "HEAD_TOO_LONG", f"the head has more than {BOUNDS.head_bytes} bytes")


async def _no_such_path(_request: Request, error: Exception) -> NoReturn:
    """What the router says, as one of our errors, which the gate answers."""
    assert isinstance(error, HTTPException)
    phrase = HTTPStatus(error.status_code).phrase
    headers = [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
    reason, message = phrase.upper().replace(" ", "_"), f"{phrase.lower()} on this server"
    raise HttpError(error.status_code, reason, message, headers=headers)
