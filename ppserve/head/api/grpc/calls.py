"""What surrounds every gRPC service's messages: whose call it is, whether it may enter, errors as statuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc import aio

from ppserve.errors import InvalidRequest, Unauthenticated, Violation
from ppserve.head.api.auth import bearer_key, caller_name
from ppserve.head.api.call import Call
from ppserve.head.api.grpc.status import end_with

log = logging.getLogger(__name__)

Context = aio.ServicerContext[Any, Any]
M = TypeVar("M", bound=Message)
Metadata = Iterable[tuple[str, str | bytes]] | None

OPEN_SERVICES = ("/grpc.health.v1.Health/",)

_LOCAL_PEERS = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", "ipv6:[::ffff:127.", "ipv6:%5B::ffff:127.", "unix:")


class KeyCheck(aio.ServerInterceptor):
    """Refuses every call without an accepted key, health excepted.

    It stands before the method is even looked up, so a new method cannot be forgotten.
    """

    def __init__(self, check_key: Callable[[str | None], None]) -> None:
        """check_key: raises Unauthenticated."""
        self._check_key = check_key

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        if not handler_call_details.method.startswith(OPEN_SERVICES):
            try:
                self._check_key(_key(handler_call_details.invocation_metadata))
            except Unauthenticated as error:
                return _refusal(error)
        return await continuation(handler_call_details)


def call_from(context: Context, keys_are_checked: bool) -> Call:
    """The call as the request handler sees it. Call this when it comes in: its deadline counts from now."""
    metadata = context.invocation_metadata()
    key = _key(metadata) if keys_are_checked else None
    certificate = b",".join(context.peer_identities() or ())
    peer = context.peer()
    caller = caller_name(key, certificate, peer.rpartition(":")[0])
    call = Call.begin(caller, context.time_remaining(), next(_texts(metadata, "traceparent"), None))
    return replace(call, is_local=peer.startswith(_LOCAL_PEERS))


def parse(kind: type[M], raw: bytes) -> M:
    """The message. Raises InvalidRequest: services parse for themselves, so that bad bytes get a proper status."""
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        problem = f"not a {kind.DESCRIPTOR.name}: malformed, or text that is not UTF-8"
        raise InvalidRequest([Violation("", problem)]) from error


def unary(
    answer: Callable[[bytes, Call], Awaitable[Message]], keys_are_checked: bool
) -> grpc.RpcMethodHandler[Any, Any]:
    """A method with one answer: errors become statuses, messages become bytes."""

    async def method(raw: bytes, context: Context) -> bytes:
        call = call_from(context, keys_are_checked)
        try:
            return (await answer(raw, call)).SerializeToString()
        except Exception as error:
            end_with(context, call.refusal(error))
            return b""

    return grpc.unary_unary_rpc_method_handler(method)


def end_stream(context: Context, call: Call, error: Exception) -> None:
    """Ends a method with many answers: with the status of what it raised, unless the caller has gone."""
    if isinstance(error, aio.BaseError):
        log.debug("the caller went away in the middle of a write", extra=call.trace)
        raise asyncio.CancelledError from None
    context.set_trailing_metadata(tuple(call.names))
    end_with(context, call.refusal(error))


def _key(metadata: Metadata) -> str | None:
    keys = map(bearer_key, _texts(metadata, "authorization"))
    return next((key for key in keys if key is not None), None)


def _texts(metadata: Metadata, name: str) -> Iterator[str]:
    return (value for key, value in metadata or () if key == name and isinstance(value, str))


def _refusal(error: Unauthenticated) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(_messages: object, context: Context) -> None:
        end_with(context, error)

    # One that takes a stream of messages is asked before the first has come.
    return grpc.stream_unary_rpc_method_handler(refuse)
