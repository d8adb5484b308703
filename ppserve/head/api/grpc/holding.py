"""What a call may hold before it is known what it asks for, and while it only listens.

gRPC waits for a call's message before it hands it on, without a limit of time, and a call that waits takes 23 KB.
Whoever opens calls and never sends a message, for which no key is needed, would fill the head's memory. So every
method is registered with gRPC as one with a stream of messages. Of that stream `HeldCalls` reads the one message,
within a time, and only of a call that was not refused by then.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from ppserve.errors import DeadlinePassed, InvalidRequest, RequestError, Violation
from ppserve.head.api.grpc.status import end_with

MESSAGE_WITHIN_S = 10.0
# Of messages that have not come in full, at most half a megabyte each: so many of calls to Health, which need no
# key, and as many of all others.
MAX_INCOMPLETE = 256
# Streams that may last for ever and ask for nothing: who watches health, or reads what is served.
MAX_LISTENERS = 256
# Whoever was ended may ask again at once. If that ended the next one, they would end each other for ever.
LISTEN_AT_LEAST_S = 60.0
_HEALTH = "/grpc.health.v1.Health/"
_LISTENING = (_HEALTH + "Watch", "/grpc.reflection.")

_MALFORMED = InvalidRequest([Violation("", "the message is malformed")])

Context = aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Method = Callable[[Any, Context], Awaitable[Any]]


class NoPlace(Exception):
    """All places are taken."""


class LimitedPlaces:
    """For so many holders. When there are more, the one that has held its place longest is ended, if it had it for
    at_least_s; else the new one is refused. within_s: how long each may hold it; None: for ever."""

    def __init__(self, number: int, within_s: float | None, at_least_s: float = 0.0) -> None:
        self._number, self._within_s, self._at_least_s = number, within_s, at_least_s
        self._held: dict[asyncio.Timeout, float] = {}  # since when, longest first

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Raises NoPlace at once, or in the block when its place goes to another; TimeoutError when its time is
        over."""
        now = asyncio.get_running_loop().time()
        if len(self._held) >= self._number:
            longest, since = next(iter(self._held.items()))
            if now - since < self._at_least_s:
                raise NoPlace
            self._end(longest)
        limit = asyncio.timeout(self._within_s)
        try:
            async with limit:
                self._held[limit] = now
                yield
        except TimeoutError:
            if limit in self._held:
                raise
            raise NoPlace from None
        finally:
            self._held.pop(limit, None)

    def _end(self, limit: asyncio.Timeout) -> None:
        del self._held[limit]
        if not limit.expired():
            limit.reschedule(asyncio.get_running_loop().time())


class HeldCalls(aio.ServerInterceptor):
    """Stands before all other interceptors, so that it sees whatever handler they choose."""

    def __init__(
        self,
        message_within_s: float = MESSAGE_WITHIN_S,
        max_incomplete: int = MAX_INCOMPLETE,
        max_listeners: int = MAX_LISTENERS,
    ) -> None:
        self._within_s = message_within_s
        self._incomplete = LimitedPlaces(max_incomplete, message_within_s)
        self._incomplete_of_health = LimitedPlaces(max_incomplete, message_within_s)
        self._listeners = LimitedPlaces(max_listeners, None, LISTEN_AT_LEAST_S)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        if not handler.request_streaming:
            places = self._incomplete_of_health if method.startswith(_HEALTH) else self._incomplete
            handler = self._with_one_message(handler, places)
        return self._listening(handler) if method.startswith(_LISTENING) else handler

    def _with_one_message(self, handler: Handler, incomplete: LimitedPlaces) -> Handler:
        parsed, to_message, to_bytes = _method(handler), handler.request_deserializer, handler.response_serializer

        async def method(_messages: object, context: Context) -> Any:
            message = await self._message(context, incomplete)
            return None if message is None else await parsed(message, context)

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(method, to_message, to_bytes)
        return grpc.stream_unary_rpc_method_handler(method, to_message, to_bytes)

    def _listening(self, handler: Handler) -> Handler:
        parsed, to_message, to_bytes = _method(handler), handler.request_deserializer, handler.response_serializer

        async def method(messages: object, context: Context) -> None:
            try:
                async with self._listeners.hold():
                    await parsed(messages, context)
            except NoPlace:
                end_with(context, _TooManyCalls("too many calls listen already: ask again later"))
            except DecodeError:
                end_with(context, _MALFORMED)

        return grpc.stream_stream_rpc_method_handler(method, to_message, to_bytes)

    async def _message(self, context: Context, incomplete: LimitedPlaces) -> Any:
        """The call's message; None where none came: then the call has its status."""
        try:
            async with incomplete.hold():
                message = await context.read()
        except NoPlace:
            end_with(context, _TooManyCalls("too many calls whose message has not come"))
            return None
        except DecodeError:
            end_with(context, _MALFORMED)
            return None
        except TimeoutError:
            end_with(context, DeadlinePassed(f"the message did not come within {self._within_s:g} s"))
            return None
        if message is aio.EOF:
            end_with(context, InvalidRequest([Violation("", "the call has no message")]))
            return None
        return message


def _method(handler: Handler) -> Method:
    """What answers, whether it writes its messages or yields them."""
    methods = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    parsed: Any = next(method for method in methods if method is not None)
    if not inspect.isasyncgenfunction(parsed):
        return cast(Method, parsed)

    async def writing(request: Any, context: Context) -> None:
        async for message in parsed(request, context):
            await context.write(message)

    return writing


class _TooManyCalls(RequestError):
    status = "UNAVAILABLE"
    reason = "TOO_MANY_CALLS"
