"""The gRPC service: calls in, messages out. Knows nothing of stages; the engine is behind `EngineHandle`.

A call of Generate lives like this: parse, check every limit, tokenize (off the loop when long), submit,
write messages as the engine delivers, and in any case tell the engine when nobody listens any more.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc import aio

from ppserve.core.request import FinishReason, Request
from ppserve.errors import Draining, InvalidRequest, RequestError, Violation
from ppserve.head.api.auth import caller_of
from ppserve.head.api.grpc.answers import model_message, topology_message
from ppserve.head.api.grpc.convert import Arrival, check, check_ids, check_text, is_fit_for_logs, to_request
from ppserve.head.api.grpc.status import Unexpected, status_code, status_metadata
from ppserve.head.api.stream import MessageWriter, RequestStream
from ppserve.head.cards import ModelCard, Topology
from ppserve.head.engine.output import Sink
from ppserve.v1 import generation_pb2 as pb

log = logging.getLogger(__name__)

SERVICE_NAME = "ppserve.v1.GenerationService"
STALL_TIMEOUT_S = 30.0
# Work on this many characters or tokens takes some milliseconds, which is as long as the loop may stand still.
LONG_TEXT = 4096
# The engine ends a sequence this long before its caller's deadline, so that the end still arrives.
DEADLINE_MARGIN_S = 0.05

Context = aio.ServicerContext[Any, Any]
M = TypeVar("M", bound=Message)
R = TypeVar("R")

_TRACEPARENT = re.compile("[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class EngineHandle(Protocol):
    """What the service needs of the engine."""

    async def submit(self, request: Request, sink: Sink) -> None:
        """Begin a request, whose outputs go to `sink`. Raises RequestError (Overloaded, Draining, ...)."""

    def cancel(self, request_id: str, reason: FinishReason) -> None:
        """Nobody listens to this request any more. Idempotent, and fine for unknown ids."""

    def model_card(self) -> ModelCard:
        """What is served."""

    def topology(self) -> Topology:
        """Where it runs. May wait for the engine's thread; called in a thread of its own."""


class TextCodec(Protocol):
    """What the service needs of the tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Raises ValueError, and nothing else."""

    def decode(self, ids: list[int]) -> str:
        """The text that these tokens show."""

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, special ones too."""


class GenerationService:
    """Answers the calls of `ppserve.v1.GenerationService`.

    tokenizer: None when only tokens can be served. keys_are_checked: whether every call that arrives here has
    an accepted API key.
    """

    def __init__(
        self,
        engine: EngineHandle,
        tokenizer: TextCodec | None,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        keys_are_checked: bool = False,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._stall_timeout_s = stall_timeout_s
        self._keys_are_checked = keys_are_checked
        self._serial = itertools.count()
        self._streams: set[RequestStream] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    def handlers(self) -> grpc.GenericRpcHandler:
        """What a server registers. Requests are parsed in the calls, so that bad bytes get a proper status."""
        stream = grpc.unary_stream_rpc_method_handler
        unary = grpc.unary_unary_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "Generate": stream(self._generate, response_serializer=pb.GenerateResponse.SerializeToString),
                "Tokenize": unary(_guarded(self._tokenize)),
                "Detokenize": unary(_guarded(self._detokenize)),
                "GetModelInfo": unary(_guarded(self._get_model_info)),
                "GetTopology": unary(_guarded(self._get_topology)),
            },
        )

    @property
    def num_open_streams(self) -> int:
        return len(self._streams)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests from now on; return when the running ones are through, or have been ended with
        UNAVAILABLE because `timeout_s` passed."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            for stream in self._streams:
                stream.fail(Draining("the server shut down before this request was through"))
            log.warning("ended %d streams at the shutdown timeout", len(self._streams))

    # ---- Generate -----------------------------------------------------------------------------------

    async def _generate(self, raw: bytes, context: Context) -> None:
        trace = {"request_id": f"req-{secrets.token_hex(8)}", **_trace(context)}
        try:
            message = _parse(pb.GenerateRequest, raw)
            if message.request_id and is_fit_for_logs(message.request_id, self._engine.model_card()):
                trace["request_id"] = message.request_id
            context.set_trailing_metadata(tuple(_returned(trace).items()))
            await self._serve(message, context, trace)
        except RequestError as error:
            _log_refusal(error, trace)
            await _abort(context, error)
        except aio.BaseError:
            log.debug("the caller went away in the middle of a write", extra=trace)
            raise asyncio.CancelledError from None
        except Exception:
            log.exception("unexpected error in Generate", extra=trace)
            await _abort(context, Unexpected())

    async def _serve(self, message: pb.GenerateRequest, context: Context, trace: dict[str, str]) -> None:
        card = self._engine.model_card()
        check(message, card)
        public_id = trace["request_id"]
        prompt_ids = await self._prompt_ids(message)
        arrival = Arrival(
            # Two calls may carry the same id: a client that resumes does, while the old call is still dying.
            id=f"{public_id}/{next(self._serial)}",
            seed=secrets.randbits(64),
            caller=caller_of(context, self._keys_are_checked),
            deadline_s=_deadline(context),
        )
        request = to_request(message, prompt_ids, card, arrival)
        writer = MessageWriter(request, public_id, self._echo(message, request), self._token_bytes)
        stream = RequestStream(request, writer)
        self._enter(stream)
        try:
            await self._engine.submit(request, stream)
            await self._write_all(stream, context)
        finally:
            self._leave(stream)
            if not stream.is_complete:
                self._engine.cancel(request.id, _why_gone(request))
        log.info("request %s: answered", public_id, extra=trace | {"caller": request.caller})

    async def _write_all(self, stream: RequestStream, context: Context) -> None:
        """Write messages as they come. A reader that takes nothing for the stall timeout loses the call."""
        watch = _StallWatch(self._stall_timeout_s)
        try:
            async for message in stream.messages():
                watch.writing()
                await context.write(message)
                watch.written()
        finally:
            watch.close()

    async def _prompt_ids(self, message: pb.GenerateRequest) -> list[int]:
        if message.WhichOneof("prompt") == "text":
            return await self._encode("prompt", message.text)
        return list(message.token_ids.ids)

    async def _encode(self, field: str, text: str) -> list[int]:
        if not text:
            return []
        tokenizer = self._tokenizer
        assert tokenizer is not None, "checked before"
        try:
            return await _aside(len(text), lambda: tokenizer.encode(text))
        except ValueError as error:
            raise InvalidRequest([Violation(field, "this text cannot be tokenized")]) from error

    def _echo(self, message: pb.GenerateRequest, request: Request) -> str:
        if not request.output.echo or self._tokenizer is None:
            return ""
        return message.text or self._tokenizer.decode(list(message.token_ids.ids))

    def _token_bytes(self, token_id: int) -> bytes:
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def _enter(self, stream: RequestStream) -> None:
        if self._draining:
            raise Draining("the server is shutting down")
        self._streams.add(stream)
        self._idle.clear()

    def _leave(self, stream: RequestStream) -> None:
        self._streams.discard(stream)
        if not self._streams:
            self._idle.set()

    # ---- the others ---------------------------------------------------------------------------------

    async def _tokenize(self, raw: bytes) -> pb.TokenizeResponse:
        request = _parse(pb.TokenizeRequest, raw)
        check_text("text", request.text, self._engine.model_card())
        ids = await self._encode("text", request.text)

        def answer() -> pb.TokenizeResponse:
            return pb.TokenizeResponse(tokens=[pb.TokenInfo(id=i, bytes=self._token_bytes(i)) for i in ids])

        return await _aside(len(ids), answer)

    async def _detokenize(self, raw: bytes) -> pb.DetokenizeResponse:
        request = _parse(pb.DetokenizeRequest, raw)
        ids = list(request.token_ids.ids)
        check_ids("token_ids.ids", ids, self._engine.model_card())
        tokenizer = self._tokenizer
        assert tokenizer is not None, "checked before"

        def answer() -> pb.DetokenizeResponse:
            content = b"".join([tokenizer.token_bytes(i) for i in ids])
            return pb.DetokenizeResponse(text=tokenizer.decode(ids), bytes=content)

        return await _aside(len(ids), answer)

    async def _get_model_info(self, raw: bytes) -> pb.GetModelInfoResponse:
        _parse(pb.GetModelInfoRequest, raw)
        return model_message(self._engine.model_card())

    async def _get_topology(self, raw: bytes) -> pb.GetTopologyResponse:
        _parse(pb.GetTopologyRequest, raw)
        return topology_message(await asyncio.to_thread(self._engine.topology))


class _StallWatch:
    """Cancels the task that created it when one write takes longer than `timeout_s`.

    A timer per write would cost more than the write; this one looks at the clock when it fires.
    """

    def __init__(self, timeout_s: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self._timer = self._loop.call_later(timeout_s, self._look)

    def writing(self) -> None:
        self._since = self._loop.time()

    def written(self) -> None:
        self._since = None

    def close(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        left_s = self._timeout_s
        if self._since is not None:
            left_s -= self._loop.time() - self._since
        if left_s <= 0:
            log.warning("a reader took nothing for %g s: its call is cut", self._timeout_s)
            self._task.cancel()
        else:
            self._timer = self._loop.call_later(left_s, self._look)


def _guarded(answer: Callable[[bytes], Awaitable[Message]]) -> Callable[[bytes, Context], Awaitable[bytes]]:
    """A unary method: errors become statuses, messages become bytes."""

    async def method(raw: bytes, context: Context) -> bytes:
        try:
            return (await answer(raw)).SerializeToString()
        except RequestError as error:
            await _abort(context, error)
        except Exception:
            log.exception("unexpected error in a call", extra=_trace(context))
            await _abort(context, Unexpected())

    return method


async def _aside(length: int, work: Callable[[], R]) -> R:
    """What `work` returns; in a thread where it has so much to do that other streams would wait for it."""
    return work() if length < LONG_TEXT else await asyncio.to_thread(work)


def _log_refusal(error: RequestError, trace: dict[str, str]) -> None:
    """Which request, why, and which fields: those by their names in the proto, without what the client wrote."""
    if isinstance(error, InvalidRequest):
        named = (violation.field.partition("[")[0] or "message" for violation in error.violations)
        trace = trace | {"fields": ", ".join(dict.fromkeys(named))}
    where = f" ({trace['fields']})" if "fields" in trace else ""
    log.info("request %s: %s%s", trace["request_id"], error.reason, where, extra=trace)


async def _abort(context: Context, error: RequestError) -> NoReturn:
    kept = tuple(context.trailing_metadata() or ())
    await context.abort(status_code(error), str(error), kept + status_metadata(error))
    raise AssertionError("abort raises")


def _parse(kind: type[M], raw: bytes) -> M:
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        problem = f"not a {kind.DESCRIPTOR.name}: malformed, or text that is not UTF-8"
        raise InvalidRequest([Violation("", problem)]) from error


def _deadline(context: Context) -> float | None:
    remaining_s = context.time_remaining()
    if remaining_s is None:
        return None
    return time.monotonic() + remaining_s - min(DEADLINE_MARGIN_S, remaining_s / 10)


def _why_gone(request: Request) -> FinishReason:
    late = request.deadline_s is not None and time.monotonic() >= request.deadline_s
    return FinishReason.DEADLINE if late else FinishReason.CANCELLED


def _trace(context: Context) -> dict[str, str]:
    """What log records of a call carry: a W3C `traceparent`, and nothing that only claims to be one."""
    for name, value in context.invocation_metadata() or ():
        if name == "traceparent" and isinstance(value, str) and _TRACEPARENT.fullmatch(value):
            return {"traceparent": value}
    return {}


def _returned(trace: dict[str, str]) -> dict[str, str]:
    names = {"request_id": "x-request-id"}
    return {names.get(name, name): value for name, value in trace.items()}
