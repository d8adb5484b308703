"""Errors as statuses and as `{"error": {...}}`, as clients of OpenAI's interface read them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from ppserve.errors import DeadlinePassed, InvalidRequest, Overloaded, RequestError, RequestFailed, Unauthenticated

_STATUSES = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "RESOURCE_EXHAUSTED": 429,
    "INTERNAL": 500,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
# A server that drains, or has lost its stages, is replaced at an unknown time.
_RETRY_UNAVAILABLE_S = 5.0
# What the proto calls it -> what callers of HTTP call it, where that is not the part after the dot.
HTTP_NAMES = {
    "token_ids.ids": "prompt",
    "output.prompt_logprobs": "logprobs",
    "stop.include_stop": "include_stop_str_in_output",
    "resume.generated_token_ids": "resume.token_ids",
    "resume.index": "resume.index",
}


class HttpError(RequestError):
    """An error that only HTTP has."""

    status = "INVALID_ARGUMENT"

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        """The HTTP status."""
        self.reason = reason
        self.param = param
        """The wrong field."""
        self.headers = headers or {}
        """Of the answer."""


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
    """The error as JSON."""
    param = error.violations[0].field if isinstance(error, InvalidRequest) else getattr(error, "param", None)
    status = status_of(error)
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return msgspec.json.encode({"error": ErrorJson(str(error), kind, param, error.reason.lower())})


def headers_of(error: RequestError) -> Mapping[str, str]:
    """Whether and when to try again, and what to bring."""
    match error:
        case HttpError(headers=headers):
            return headers
        case Unauthenticated():
            return {"www-authenticate": "Bearer"}
        case RequestFailed() | DeadlinePassed():
            # It would fail again, and openai-python repeats every 5xx unless told not to.
            return {"x-should-retry": "false"}
        case Overloaded(retry_after_s=retry_after_s):
            return _retry_after(retry_after_s)
    return _retry_after(_RETRY_UNAVAILABLE_S) if status_of(error) == 503 else {}


def _retry_after(seconds: float) -> Mapping[str, str]:
    """In whole seconds, as the standard has it, and exactly, as openai-python also reads it."""
    return {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1000))}
