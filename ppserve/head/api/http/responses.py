"""Answers over HTTP: JSON, server-sent events, and errors in the form that OpenAI's clients read."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ppserve.errors import DeadlinePassed, InvalidRequest, Overloaded, RequestError, RequestFailed, Unauthenticated

_encoder = msgspec.json.Encoder()
# U+0085, U+2028 and U+2029. Readers that split text with `str.splitlines` would end an event there; all other
# characters at which that splits are escaped in any JSON.
_LINE_ENDS = re.compile(b"\xc2\x85|\xe2\x80[\xa8\xa9]")

# A server that drains or lost its stages is replaced at an unknown time.
_RETRY_UNAVAILABLE_S = 5.0


def encode(content: object) -> bytes:
    """Write JSON that is one line for every reader of lines."""
    encoded = _encoder.encode(content)
    return encoded if encoded.isascii() else _LINE_ENDS.sub(_escape, encoded)


def _escape(found: re.Match[bytes]) -> bytes:
    return b"\\u%04x" % ord(found[0].decode())


def event(content: bytes, name: str = "") -> bytes:
    """Write a server-sent event. content: one line. name: its type, for protocols that name events."""
    return (b"event: %b\n" % name.encode() if name else b"") + b"data: %b\n\n" % content


class JsonResponse(Response):
    """A complete answer. msgspec encodes its content, unless that is bytes already."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else encode(content)


class EventStream(StreamingResponse):
    """Server-sent events. However the answer ends, `owned`, which they are made of, is closed."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], owned: AsyncExitStack) -> None:
        # The second header asks nginx to hand on each event at once.
        super().__init__(events, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        owned.push_async_callback(events.aclose)
        self._owned = owned

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._owned:
                await super().__call__(scope, receive, send)
        except asyncio.CancelledError:
            # The server closes: what waits to be sent would keep the connection open.
            scope["state"]["transport"].abort()


class HttpError(RequestError, status="INVALID_ARGUMENT"):
    """An error that only HTTP has."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.http_status = code
        self.reason = reason
        self.param = param  # the wrong field
        self.headers = headers or {}  # of the answer


class TooManyConnections(Overloaded, status="RESOURCE_EXHAUSTED", http_status=503, reason="TOO_MANY_CONNECTIONS"):
    """All connections that there may be have a request."""

    def __init__(self) -> None:
        super().__init__("there are too many connections", retry_after_s=1.0)


def error_response(error: RequestError, content: bytes) -> Response:
    """Make the answer that tells an error. content: the error in the form of its path."""
    return JsonResponse(content, error.http_status, dict(_headers_of(error)))


def error_json(error: RequestError) -> bytes:
    """Write an error in OpenAI's form. `code` is for programs: `reason` in lower case, which does not change."""
    status, param = error.http_status, getattr(error, "param", None)
    if isinstance(error, InvalidRequest):
        param = error.violations[0].field
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    told = {"message": str(error), "type": kind, "param": param, "code": error.reason.lower()}
    return encode({"error": told})


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """How a path writes errors. name, schema: what `/openapi.json` says of them."""

    write: Callable[[RequestError], bytes]
    name: str
    schema: Mapping[str, Any]


OPENAI_ERRORS = ErrorForm(
    error_json,
    "Error",
    {
        "title": "Error",
        "description": "An answer whose status is not 200.",
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"], "description": "The field that is wrong."},
                    "code": {"type": "string", "description": "It does not change; the message may."},
                },
                "required": ["message", "type", "param", "code"],
            },
        },
        "required": ["error"],
    },
)


def _headers_of(error: RequestError) -> Mapping[str, str]:
    match error:
        case HttpError(headers=headers):
            return headers
        case Unauthenticated():
            return {"www-authenticate": "Bearer"}
        case RequestFailed() | DeadlinePassed():
            # The request would fail again, and openai-python repeats every 5xx unless it is told not to.
            return {"x-should-retry": "false"}
        case Overloaded(retry_after_s=seconds):
            return _retry_after(seconds)
    return _retry_after(_RETRY_UNAVAILABLE_S) if error.http_status == 503 else {}


def _retry_after(seconds: float) -> Mapping[str, str]:
    return {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1000))}
