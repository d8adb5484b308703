"""The HTTP server: paths, keys, time limits, and errors as answers."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import NoReturn

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from ppserve.config import ServerSettings
from ppserve.head.api.http import describing
from ppserve.head.api.http.calls import JsonResponse, begin_call, key_of, name_call, time_limit
from ppserve.head.api.http.chat import ChatTemplate, chat_completions
from ppserve.head.api.http.failures import HttpError, content_of, headers_of, status_of
from ppserve.head.api.http.generating import completions
from ppserve.head.api.request_handler import RequestHandler
from ppserve.head.api.tls import Certificates, read_certificates
from ppserve.head.listener import Listener

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 2048
OPEN_PATHS = ("/health",)
# The caller hung up before it was answered: nginx's number.
_CALLER_GONE = 499
_OTHER_PATHS = "other"

Endpoint = Callable[[Request, RequestHandler], Awaitable[Response]]


class HttpServer:
    """Serves until `stop`."""

    def __init__(
        self, settings: ServerSettings, request_handler: RequestHandler, count_answer: Callable[[str, int], None]
    ) -> None:
        """count_answer: is told the path of every answer ("other" where it is not served) and its status. Raises
        ConfigError for certificates and a chat template that cannot be used."""
        self._settings = settings
        template = ChatTemplate(settings.chat_template) if settings.chat_template else None
        self._request_handler = request_handler
        self._count_answer = count_answer
        endpoints: list[tuple[str, str, Endpoint]] = [
            ("POST", "/v1/completions", completions),
            ("POST", "/v1/chat/completions", partial(chat_completions, template)),
            ("GET", "/v1/models", describing.models),
            ("GET", "/v1/models/{name}", describing.model),
            ("GET", "/health", describing.health),
            ("GET", "/version", describing.version),
            ("GET", "/tokenizer_info", partial(describing.tokenizer_info, template.source if template else None)),
            ("POST", "/tokenize", describing.tokenize),
            ("POST", "/detokenize", describing.detokenize),
        ]
        self._paths = frozenset(path for _, path, _ in endpoints if "{" not in path)
        app = Starlette(
            routes=[
                Route(path, partial(self._answer, endpoint), methods=[method])
                for method, path, endpoint in endpoints
            ],
            exception_handlers={HTTPException: self._missing},
        )
        # Not sent elsewhere: an address made of the caller's own Host header may be anybody's.
        app.router.redirect_slashes = False
        tls = read_certificates(settings)
        self._newest_tls = tls.context if tls else None
        if tls is not None:
            # Called in every handshake, also of clients that name no server.
            tls.context.sni_callback = self._show_newest
        self._listener = Listener(app, MAX_CONNECTIONS, self._newest_tls)

    async def start(self) -> int:
        """Bind and listen; return the port. Raises ConfigError when the address cannot be bound."""
        return await self._listener.start(self._settings.host, self._settings.http_port, "--http-port")

    def show(self, certificates: Certificates) -> None:
        """To new connections, from now on; those that stand keep theirs."""
        self._newest_tls = certificates.context

    def _show_newest(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        assert self._newest_tls is not None
        connection.context = self._newest_tls

    async def stop(self, timeout_s: float) -> None:
        """Turn unhealthy at once, refuse new requests, let running ones finish for `timeout_s`, then close."""
        await self._request_handler.drain(timeout_s)
        await self._listener.stop()

    # ---- around every path ----------------------------------------------------------------------------

    async def _missing(self, request: Request, error: Exception) -> Response:
        """The answer for a path or method that does not exist. Callers without a key do not learn which exist."""
        assert isinstance(error, HTTPException)
        phrase, headers = HTTPStatus(error.status_code).phrase, error.headers
        reason, message = phrase.upper().replace(" ", "_"), f"{phrase.lower()} on this server"

        async def refuse(_request: Request, _handler: RequestHandler) -> NoReturn:
            raise HttpError(error.status_code, reason, message, headers=headers)

        return await self._answer(refuse, request)

    async def _answer(self, endpoint: Endpoint, request: Request) -> Response:
        """The endpoint's answer, or its error as one; counted, and with the call's names."""
        handler, path = self._request_handler, request.scope["path"]
        request.state.call = begin_call(request, handler)
        try:
            if path not in OPEN_PATHS:
                handler.check_key(key_of(request))
            name_call(request, handler)
            async with time_limit(request):
                response = await endpoint(request, handler)
        except ClientDisconnect:
            log.debug(
                "request %s: its caller hung up", request.state.call.request_id, extra=request.state.call.trace
            )
            response = Response(status_code=_CALLER_GONE)
        except Exception as error:
            told = request.state.call.refusal(error)
            response = JsonResponse(content_of(told), status_of(told), dict(headers_of(told)))
        response.headers.update(dict(request.state.call.names))
        self._count_answer(path if path in self._paths else _OTHER_PATHS, response.status_code)
        return response
