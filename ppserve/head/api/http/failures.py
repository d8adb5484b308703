"""Errors as statuses and as `{"error": {...}}`, as clients of OpenAI's interface read them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from ppserve.errors import DeadlinePassed, InvalidRequest, Overloaded, RequestError, RequestFailed, Unauthenticated
from ppserve.head.api.requests import named_for

_STATUSES = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "RESOURCE_EXHAUSTED": 429,
    "INTERNAL": 500,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
# A server that drains, or has lost its stages, is replaced; nobody knows when.
_RETRY_UNAVAILABLE_S = 5.0
# What the proto calls it -> what callers of HTTP call it, where that is not the part after the dot.
_HTTP_NAMES = {
    "token_ids.ids": "prompt",
    "output.prompt_logprobs": "logprobs",
    "stop.include_stop": "include_stop_str_in_output",
    "resume.generated_token_ids": "resume.token_ids",
    "resume.index": "resume.index",
}

Headers = Sequence[tuple[bytes, bytes]]


class HttpError(RequestError):
    """An error that only HTTP has. code: the HTTP status. param: the wrong field. headers: of the answer."""

    status = "INVALID_ARGUMENT"

    def __init__(
        self, code: int, reason: str, message: str, param: str | None = None, headers: Headers = ()
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.param = param
        self.headers = headers


class ErrorJson(msgspec.Struct):
    """The inside of `{"error": ...}`. code: stable, for programs; our `reason` in lower case."""

    message: str
    type: str
    param: str | None
    code: str


def status_of(error: RequestError) -> int:
    """The HTTP status of an error."""
    return error.code if isinstance(error, HttpError) else _STATUSES[error.status]


def content_of(error: RequestError) -> bytes:
    """The error as JSON. Fields have the names that callers of HTTP know."""
    message, param = str(error), None
    if isinstance(error, InvalidRequest):
        named = [(named_for(violation.field, _HTTP_NAMES), violation.problem) for violation in error.violations]
        message, param = "; ".join(f"{name}: {problem}" for name, problem in named), named[0][0]
    elif isinstance(error, HttpError):
        param = error.param
    status = status_of(error)
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return msgspec.json.encode({"error": ErrorJson(message, kind, param, error.reason.lower())})


def headers_of(error: RequestError) -> list[tuple[bytes, bytes]]:
    """Whether and when to try again, and what to bring."""
    match error:
        case HttpError(headers=headers):
            return list(headers)
        case Unauthenticated():
            return [(b"www-authenticate", b"Bearer")]
        case RequestFailed() | DeadlinePassed():
            # Again it would fail again, and openai-python repeats every 5xx unless told not to.
            return [(b"x-should-retry", b"false")]
        case Overloaded(retry_after_s=retry_after_s):
            return _retry_after(retry_after_s)
    return _retry_after(_RETRY_UNAVAILABLE_S) if status_of(error) == 503 else []


def _retry_after(seconds: float) -> list[tuple[bytes, bytes]]:
    """In whole seconds, as the standard has it, and exactly, as openai-python also reads it."""
    return [
        (b"retry-after", str(math.ceil(seconds)).encode()),
        (b"retry-after-ms", str(math.ceil(seconds * 1000)).encode()),
    ]
