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
from grpc import aio

from ppserve.errors import DeadlinePassed, InvalidRequest, RequestError, Violation
from ppserve.head.api.grpc.status import end_with

MESSAGE_WITHIN_S = 10.0
# Of messages that have not come in full, at most half a megabyte each.
MAX_INCOMPLETE = 512
# Streams that may last for ever and ask for nothing: who watches health, or reads what is served.
MAX_LISTENERS = 256
_LISTENING = ("/grpc.health.v1.Health/Watch", "/grpc.reflection.")

Context = aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Asked = Callable[[Any, Context], Awaitable[Any]]


class LimitedPlaces:
    """For so many holders. When there are more, the one that has held its place longest is ended. within_s: how
    long each may hold it; None: for ever."""

    def __init__(self, number: int, within_s: float | None) -> None:
        self._number, self._within_s = number, within_s
        self._held: dict[asyncio.Timeout, None] = {}

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Raises TimeoutError in the block when its time is over, or its place goes to another."""
        async with asyncio.timeout(self._within_s) as limit:
            self._held[limit] = None
            try:
                if len(self._held) > self._number:
                    self._end(next(iter(self._held)))
                yield
            finally:
                self._held.pop(limit, None)

    def _end(self, limit: asyncio.Timeout) -> None:
        del self._held[limit]
        if not limit.expired():
            limit.reschedule(asyncio.get_running_loop().time())


class HeldCalls(aio.ServerInterceptor):
    """Stands before all other interceptors, so that it sees whatever handler they choose."""

    def __init__(self, message_within_s: float = MESSAGE_WITHIN_S, max_incomplete: int = MAX_INCOMPLETE) -> None:
        self._within_s = message_within_s
        self._incomplete = LimitedPlaces(max_incomplete, message_within_s)
        self._listeners = LimitedPlaces(MAX_LISTENERS, None)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        if handler_call_details.method.startswith(_LISTENING):
            return self._listening(handler)
        return handler if handler.request_streaming else self._with_one_message(handler)

    def _with_one_message(self, handler: Handler) -> Handler:
        asked, to_message, to_bytes = _method(handler), handler.request_deserializer, handler.response_serializer

        async def method(_messages: object, context: Context) -> Any:
            message = await self._message(context)
            return None if message is None else await asked(message, context)

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(method, to_message, to_bytes)
        return grpc.stream_unary_rpc_method_handler(method, to_message, to_bytes)

    def _listening(self, handler: Handler) -> Handler:
        if not handler.request_streaming:
            handler = self._with_one_message(handler)
        asked, to_message, to_bytes = _method(handler), handler.request_deserializer, handler.response_serializer

        async def method(messages: object, context: Context) -> None:
            try:
                async with self._listeners.hold():
                    await asked(messages, context)
            except TimeoutError:
                end_with(context, _TooManyListeners(f"more than {MAX_LISTENERS} listen: ask again"))

        return grpc.stream_stream_rpc_method_handler(method, to_message, to_bytes)

    async def _message(self, context: Context) -> Any:
        """The call's message; None where none came: then the call has its status."""
        try:
            async with self._incomplete.hold():
                message = await context.read()
        except TimeoutError:
            end_with(context, DeadlinePassed(f"the message did not come within {self._within_s:g} s"))
            return None
        if message is aio.EOF:
            end_with(context, InvalidRequest([Violation("", "the call has no message")]))
            return None
        return message


def _method(handler: Handler) -> Asked:
    """What answers, whether it writes its messages or yields them."""
    methods = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    asked: Any = next(method for method in methods if method is not None)
    if not inspect.isasyncgenfunction(asked):
        return cast(Asked, asked)

    async def writing(request: Any, context: Context) -> None:
        async for message in asked(request, context):
            await context.write(message)

    return writing


class _TooManyListeners(RequestError):
    status = "UNAVAILABLE"
    reason = "TOO_MANY_LISTENERS"
