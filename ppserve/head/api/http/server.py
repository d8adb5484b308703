"""The HTTP server: paths, keys, time limits, and errors as answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ppserve.errors import DeadlinePassed, InvalidRequest, Violation, did_you_mean
from ppserve.head.api.call import Call
from ppserve.head.api.http import describing
from ppserve.head.api.http.answers import ChoiceAnswers
from ppserve.head.api.http.anthropic_body import MessagesBody
from ppserve.head.api.http.anthropic_messages import MESSAGES_ERRORS, MessageAnswers, count_tokens
from ppserve.head.api.http.bodies import CompletionBody
from ppserve.head.api.http.chat import ChatAnswers, ChatBody
from ppserve.head.api.http.generating import generate
from ppserve.head.api.http.openai_responses import ResponseAnswers, ResponsesBody
from ppserve.head.api.http.openapi import Endpoint, HttpPath, describe_paths
from ppserve.head.api.http.page import PageState
from ppserve.head.api.http.responses import (
    OPENAI_ERRORS,
    HttpError,
    JsonResponse,
    TooManyConnections,
    error_json,
    error_response,
)
from ppserve.head.api.request_handler import RequestHandler
from ppserve.head.api.tls import Certificates
from ppserve.head.listener import Listener

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 2048
MAX_TIMEOUT_S = 86_400.0
# The caller hung up before its answer. The number is nginx's.
_CALLER_GONE = 499
_OTHER_PATHS = "other"
# A page of another origin may read these headers beside an answer's body.
EXPOSED_HEADERS = (
    *("x-request-id", "traceparent", "retry-after", "retry-after-ms", "x-should-retry", "x-ignored-fields"),
    "www-authenticate",
)

PATHS = [
    HttpPath(
        "POST", "/v1/completions", "Go on with a prompt.",
        partial(generate, kind=CompletionBody, form=ChoiceAnswers), CompletionBody, generates=True,
    ),
    HttpPath(
        "POST", "/v1/chat/completions", "Answer the messages of a chat.",
        partial(generate, kind=ChatBody, form=ChatAnswers), ChatBody, generates=True,
    ),
    HttpPath(
        "POST", "/v1/responses", "Answer a chat in the form of OpenAI's responses. Nothing is stored.",
        partial(generate, kind=ResponsesBody, form=ResponseAnswers), ResponsesBody, generates=True,
    ),
    HttpPath(
        "POST", "/v1/messages", "Answer the messages of a chat, in Anthropic's form.",
        partial(generate, kind=MessagesBody, form=MessageAnswers), MessagesBody,
        generates=True, errors=MESSAGES_ERRORS,
    ),
    HttpPath(
        "POST", "/v1/messages/count_tokens", "Count the tokens of a chat in Anthropic's form.",
        count_tokens, MessagesBody, errors=MESSAGES_ERRORS,
    ),
    HttpPath("GET", "/v1/models", "List the model under each of its names.", describing.models),
    HttpPath("GET", "/v1/models/{name:path}", "Describe the model of this name.", describing.model),
    HttpPath("GET", "/health", "Say whether a replica has all its stages.", describing.health, is_open=True),
    HttpPath("GET", "/version", "Tell ppserve's version and the system fingerprint.", describing.version),
    HttpPath("GET", "/tokenizer_info", "Tell what tokenizer_config.json holds.", describing.tokenizer_info),
    HttpPath("POST", "/tokenize", "Make tokens of a text.", describing.tokenize, describing.TokenizeBody),
    HttpPath("POST", "/detokenize", "Make a text of tokens.", describing.detokenize, describing.DetokenizeBody),
]  # fmt: skip
"""The paths of every server; `HttpServer` adds those that describe itself."""


class HttpServer(Listener):
    """A server of OpenAI's paths, from `start` to `stop`."""

    def __init__(
        self,
        handler: RequestHandler,
        count_answer: Callable[[str, int], None],
        tls: Certificates | None = None,
        cors_origins: Sequence[str] = (),
        max_connections: int = MAX_CONNECTIONS,
        page: PageState | None = None,
    ) -> None:
        """count_answer: is called with every answer's path, or "other" if that is not served, and its status.
        cors_origins: pages of these origins may read answers; "*" for all. page: what the page shows; None if
        there is no page."""
        self._handler = handler
        self._count_answer = count_answer
        described = HttpPath("GET", "/openapi.json", "Describe these paths.", self._describe)
        self._served = [*PATHS, described, *(page.paths() if page is not None else ())]
        self._by_path = {each.path: each for each in self._served if "{" not in each.path}
        app = Starlette(
            routes=[
                Route(each.path, partial(self._answer, each.answer), methods=[each.method])
                for each in self._served
            ],
            exception_handlers={HTTPException: self._missing},
        )
        # No redirect: its address would hold the caller's own Host header.
        app.router.redirect_slashes = False
        shared = _SharedWithPages(app, cors_origins, count_answer) if cors_origins else app
        super().__init__(shared, "--http-port", max_connections, tls.context if tls else None)

    def malformed(self) -> tuple[str, bytes]:
        self._count_answer(_OTHER_PATHS, 400)
        return JsonResponse.media_type, error_json(HttpError(400, "MALFORMED_REQUEST", "not a request of HTTP"))

    # ---- around every path ----

    async def _missing(self, request: Request, error: Exception) -> Response:
        """Answer for an unknown path or method, which needs a key like others."""
        assert isinstance(error, HTTPException)
        reason = error.detail.upper().replace(" ", "_")
        message = self._why_missing(request, error)

        async def refuse(_request: Request, _handler: RequestHandler) -> NoReturn:
            raise HttpError(error.status_code, reason, message, headers=error.headers)

        return await self._answer(refuse, request)

    def _why_missing(self, request: Request, error: HTTPException) -> str:
        path = request.scope["path"]
        if error.status_code == 405:
            takes = {*(error.headers or {})["Allow"].split(", ")} - {"HEAD"}
            return f"{path[:100]} takes {', '.join(takes)}, not {request.method}"
        if path == "/metrics":
            return "the metrics have a port of their own (--metrics-port, 9400 by default)"
        helps = did_you_mean(path, self._by_path) or "; GET /openapi.json lists the paths"
        return f"there is no path {path[:100]!r} on this server{helps}"

    async def _answer(self, endpoint: Endpoint, request: Request) -> Response:
        path, state = request.scope["path"], request.state
        served = self._by_path.get(path)
        state.call = begin_call(request, self._handler.keys is not None)
        try:
            timeout_s = self._admit(request, served)
            async with asyncio.timeout(timeout_s):
                response = await endpoint(request, self._handler)
        except ClientDisconnect:
            log.debug("request %s: its caller hung up", state.call.request_id, extra=state.call.trace)
            response = Response(status_code=_CALLER_GONE)
        except Exception as error:
            is_late = isinstance(error, TimeoutError)
            told = state.call.refusal(DeadlinePassed("the caller's time limit passed") if is_late else error)
            errors = OPENAI_ERRORS if served is None else served.errors
            response = error_response(told, errors.write(told))
        response.headers.update(dict(state.call.names))
        if ignored := getattr(state, "ignored", ""):
            response.headers["x-ignored-fields"] = ignored
        if state.is_surplus:
            response.headers["connection"] = "close"
        self._count_answer(_OTHER_PATHS if served is None else path, response.status_code)
        return response

    async def _describe(self, _request: Request, handler: RequestHandler) -> Response:
        """GET /openapi.json."""
        return JsonResponse(describe_paths(self._served, handler.description.version, handler.keys is not None))

    def _admit(self, request: Request, served: HttpPath | None) -> float | None:
        """Return for how many seconds the caller waits; None if it waits without a limit.

        Raises InvalidRequest, TooManyConnections or Unauthenticated.
        """
        handler, state = self._handler, request.state
        with handler.counting_refusals(served is not None and served.generates):
            if state.is_surplus:
                raise TooManyConnections
            if handler.keys is not None and not (served is not None and served.is_open):
                handler.keys.check(request.headers)
            # The caller, or a proxy, may have named the call.
            state.call = state.call.named(request.headers.get("x-request-id", ""), "x-request-id")
            timeout_s = read_timeout(request.headers.get("x-request-timeout", ""))
            state.call = state.call.within(timeout_s)
            return timeout_s


class _SharedWithPages(CORSMiddleware):
    """Lets pages of these origins read answers, and answers preflights, which have no key. Errors have OpenAI's
    form."""

    def __init__(self, app: ASGIApp, origins: Sequence[str], count_answer: Callable[[str, int], None]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=EXPOSED_HEADERS,
        )
        self._count_answer = count_answer

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code != 200:
            why = bytes(response.body).decode().lower()
            error = HttpError(response.status_code, "CORS", f"{why} (--cors-origin)")
            response = error_response(error, error_json(error))
        self._count_answer(_OTHER_PATHS, response.status_code)
        return response


def begin_call(request: Request, has_keys: bool) -> Call:
    """Make a call of what HTTP knows about it."""
    tls = request.state.transport.get_extra_info("ssl_object")
    certificate = tls and tls.getpeercert(binary_form=True)
    host = request.client.host if request.client is not None else ""
    return Call.begin(request.headers, certificate or b"", host, has_keys)


def read_timeout(text: str) -> float | None:
    """Return the seconds that a header gives; None if it is empty. Raises InvalidRequest."""
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TIMEOUT_S:
        problem = f"not a number of seconds above 0, up to {MAX_TIMEOUT_S:g}"
        raise InvalidRequest([Violation("x-request-timeout", problem)])
    return seconds
