"""Converts between callers' values and the proto's messages; failed calls become `CallFailed`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import grpc
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from ppserve.answers import Chat, Chunk, Finish, PromptOrChat, Timings, Token, Usage, read_prompt
from ppserve.errors import PpserveError, Violation
from ppserve.grammar.structured_output import StructuredOutput
from ppserve.v1 import generation_pb2 as pb

_DETAILS_KEY = "grpc-status-details-bin"
# Only by these texts does gRPC say what it found at an address.
_AT = r"(?:ipv[46]:|(?=unix:))(\S+): "
_NOBODY = re.compile(
    _AT + "(?:Failed to connect to|connect failed).*(?:Connection refused|No such file or directory)"
)
_NO_HOST = re.compile(
    r"(?:errors resolving|DNS resolution failed for) (?:dns:/*)?(\S+?)(?::\d+)?: .*Domain name not found"
)
_ANOTHER = re.compile(_AT + "Failed parsing HTTP/2")
_NO_TLS = re.compile(_AT + "Tls handshake failed.*WRONG_VERSION_NUMBER")
_NOT_TRUSTED = re.compile(_AT + "Tls handshake failed.*CERTIFICATE_VERIFY_FAILED: ([^:]+)")
_ANOTHER_NAME = re.compile(_AT + "Custom verification check failed.*Hostname Verification Check")
_HANGS_UP = re.compile(
    "failed to connect to all addresses.*" + _AT + ".*(?:Socket closed|Connection reset by peer)"
)


SERVES_ONE_THAT_ANSWERS = "ppserve serve --model smollm2"
"""The command that is proposed where there is no server, or none whose model answers."""


@dataclass(eq=False)
class CallFailed(PpserveError):
    """A failed call. Its `__cause__` is the first failure in a row, preferably one for which the server gave a
    reason."""

    code: str  # name of the gRPC status, such as INVALID_ARGUMENT
    problem: str
    reason: str = ""  # the server's stable name for the failure; empty without an answer
    violations: tuple[Violation, ...] = ()  # the wrong fields of the request
    retry_after_s: float | None = None  # how long the server asks the client to wait

    def __str__(self) -> str:
        at_first = f" (at first: {self.__cause__})" if self.__cause__ is not None else ""
        return f"{self.code}: {self.problem}{at_first}"


def to_message(prompt: PromptOrChat, options: Mapping[str, Any]) -> pb.GenerateRequest:
    """Return the message that asks for this. options: the result of `answers.read_options`.
    Raises ValueError for a value that its field cannot hold, TypeError for a prompt of another type."""
    request = pb.GenerateRequest()
    match read_prompt(prompt):
        case str() as text:
            _fill(request, "text", text, "prompt")
        case Chat(messages):
            for role, content in messages:
                message = request.chat.messages.add()
                _fill(message, "role", role, "prompt")
                _fill(message, "content", content, "prompt")
        case ids:
            _fill(request.token_ids, "ids", ids, "prompt")
    # The request is searched last: its own `stop` and `token_ids` are messages, not these options.
    homes = (request.sampling, request.stop, request.output, request)
    for name, value in options.items():
        if isinstance(value, StructuredOutput):
            _fill(request.structured_output, "kind", pb.StructuredOutput.Kind.Value(value.kind.upper()), name)
            _fill(request.structured_output, "source", value.source, name)
        elif name != "timeout_s":
            _fill(next(home for home in homes if name in home.DESCRIPTOR.fields_by_name), name, value, name)
    return request


def _fill(home: Message, field: str, value: Any, name: str) -> None:
    """Set a field of a message. name: the option's name, for messages. Raises ValueError."""
    try:
        if isinstance(value, Mapping):
            getattr(home, field).update(value)
        elif isinstance(value, tuple):
            getattr(home, field).extend(value)
        else:
            setattr(home, field, value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def read_chunk(message: pb.GenerateResponse) -> Chunk:
    ended, usage = message.HasField("finish"), message.usage
    return Chunk(
        request_id=message.request_id,
        index=message.index,
        first_token=message.first_token,
        num_tokens=message.num_tokens,
        text=message.text,
        tokens=tuple(_token(token) for token in message.tokens),
        prompt_tokens=tuple(_token(token) for token in message.prompt_tokens),
        seed=message.seed if message.HasField("seed") else None,
        finish=_finish(message.finish) if ended else None,
        usage=Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) if ended else None,
        timings=_timings(message.timings) if message.HasField("timings") else None,
    )


def read_tokens(response: pb.TokenizeResponse) -> tuple[Token, ...]:
    return tuple(_token(token) for token in response.tokens)


def _token(token: pb.TokenInfo) -> Token:
    logprob = token.logprob if token.HasField("logprob") else None
    return Token(token.id, token.bytes, logprob, tuple(Token(top.id, top.bytes, top.logprob) for top in token.top))


def _finish(finish: pb.Finish) -> Finish:
    kind = finish.WhichOneof("matched")
    return Finish(pb.Finish.Reason.Name(finish.reason), None if kind is None else getattr(finish, kind))


def _timings(timings: pb.Timings) -> Timings:
    return Timings(
        timings.queue_seconds,
        timings.prefill_seconds,
        timings.ttft_seconds,
        timings.decode_seconds,
        tuple(timings.stage_busy_seconds),
    )


def read_failure(error: grpc.RpcError) -> CallFailed:
    """Return the exception for a call, blocking or not, that gRPC ended with an error."""
    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError)
    named, wrong, pause = ErrorInfo(), BadRequest(), RetryInfo()
    for name, value in error.trailing_metadata() or ():
        if name == _DETAILS_KEY and isinstance(value, bytes):
            for detail in Status.FromString(value).details:
                any(detail.Unpack(kind) for kind in (named, wrong, pause))
    violations = tuple(Violation(v.field, v.description) for v in wrong.field_violations)
    retry_after_s = pause.retry_delay.ToNanoseconds() / 1e9 if pause.HasField("retry_delay") else None
    code = error.code()
    name = code.name if code is not None else "UNKNOWN"
    return CallFailed(name, in_words(error.details() or ""), named.reason, violations, retry_after_s)


def no_server(place: str, why: str = "") -> str:
    """Say that nobody listens at a place, and what to do. why: what is known about it."""
    return f"no server at {place}{why}; start one with: {SERVES_ONE_THAT_ANSWERS}"


def in_words(problem: str) -> str:
    """Explain gRPC's text where it found no gRPC server at an address; return others as they are."""
    if found := _NOBODY.search(problem):
        return no_server(unquote(found[1]))
    if found := _ANOTHER.search(problem):
        why = f"{unquote(found[1])} speaks HTTP or another protocol, not gRPC"
        return f"{why}; give the server's gRPC port (--port, 50051 by default)"
    if found := _NO_TLS.search(problem):
        return f"{unquote(found[1])} does not speak TLS; ask it without"
    if found := _NOT_TRUSTED.search(problem):
        why = f"the certificate of {unquote(found[1])} is not trusted ({found[2]})"
        return f"{why}; name the authority that signed it (--tls-ca)"
    if found := _ANOTHER_NAME.search(problem):
        return f"the certificate of {unquote(found[1])} is for another name; ask the server by one of its names"
    if found := _HANGS_UP.search(problem):
        why = f"{unquote(found[1])} hangs up before it answers"
        asked = "a server with --tls-cert is asked with TLS (--tls or --tls-ca)"
        return f"{why}; {asked}, one with --tls-client-ca with a certificate too (--tls-cert, --tls-key)"
    if found := _NO_HOST.search(problem):
        return f"no host is called {unquote(found[1])}"
    return problem
