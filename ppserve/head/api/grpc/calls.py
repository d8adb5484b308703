"""Calls of gRPC services: their callers and keys, and errors as statuses with details of `google.rpc`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeAlias

import grpc
from google.protobuf.any import pack
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc import aio

from ppserve.errors import InvalidRequest, Overloaded, RequestError, Unauthenticated, Violation
from ppserve.head.api.auth import ApiKeys
from ppserve.head.api.call import Call
from ppserve.head.api.request_handler import RequestHandler

log = logging.getLogger(__name__)

Context = aio.ServicerContext[Any, Any]
MethodHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

DOMAIN = "ppserve"
DETAILS_KEY = "grpc-status-details-bin"
OPEN_SERVICES = ("/grpc.health.v1.Health/",)

GENERATE = "Generate"
"""The method of every service that generates."""
LOCAL_PEERS = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", "ipv6:[::ffff:127.", "ipv6:%5B::ffff:127.", "unix:")


class Service(Protocol):
    """A service: it has the methods of its proto, each of which takes a message and its `Call`."""

    descriptor: ServiceDescriptor


class KeyCheck(aio.ServerInterceptor):
    """An interceptor that refuses calls without an accepted key, except those for health.

    It runs before the method is looked up, so a new method cannot be forgotten.
    """

    def __init__(self, handler: RequestHandler, keys: ApiKeys) -> None:
        self._handler, self._keys = handler, keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[MethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> MethodHandler | None:
        method = handler_call_details.method
        if not method.startswith(OPEN_SERVICES):
            try:
                with self._handler.counting_refusals(method.endswith("/" + GENERATE)):
                    self._keys.check(first_of_each(handler_call_details.invocation_metadata))
            except Unauthenticated as error:
                return _refusal(error)
        return await continuation(handler_call_details)


def registered(service: Service, handler: RequestHandler) -> grpc.GenericRpcHandler:
    """Return a service in the form in which a server registers it."""
    methods = [method for method in service.descriptor.methods if hasattr(service, method.name)]
    handlers = {method.name: _method(service, method, handler) for method in methods}
    return grpc.method_handlers_generic_handler(service.descriptor.full_name, handlers)


def call_from(context: Context, has_keys: bool) -> Call:
    """Make a call of what gRPC knows about it. The caller's time limit counts from now."""
    peer = context.peer()
    certificate = b",".join(context.peer_identities() or ())
    metadata = first_of_each(context.invocation_metadata())
    call = Call.begin(metadata, certificate, peer.rpartition(":")[0], has_keys).within(context.time_remaining())
    return replace(call, is_local=peer.startswith(LOCAL_PEERS))


def first_of_each(metadata: Iterable[tuple[str, Any]] | None) -> dict[str, Any]:
    """Return the entries by their names. Of several with one name the first counts, as in HTTP."""
    return dict(reversed(tuple(metadata or ())))


def _method(service: Service, method: MethodDescriptor, handler: RequestHandler) -> MethodHandler:
    """Make a handler that takes bytes and parses them itself: if gRPC did, bad bytes would get no proper
    status."""
    answered = partial(_answer, getattr(service, method.name), method, handler)
    if method.server_streaming:
        return grpc.unary_stream_rpc_method_handler(answered)
    return grpc.unary_unary_rpc_method_handler(answered)


async def _answer(
    answer: Callable[..., Any], method: MethodDescriptor, handler: RequestHandler, raw: bytes, context: Context
) -> bytes:
    call = call_from(context, handler.keys is not None)
    try:
        with handler.counting_refusals(method.name == GENERATE):
            message = _parsed(GetMessageClass(method.input_type), raw)
            call = call.named(getattr(message, "request_id", ""))
        context.set_trailing_metadata(tuple(call.names))
        if not method.server_streaming:
            content: bytes = (await answer(message, call)).SerializeToString()
            return content
        async with aclosing(answer(message, call)) as messages:
            async for message in messages:
                await context.write(message.SerializeToString())
    except aio.BaseError:
        log.debug("the caller went away in the middle of a write", extra=call.trace)
        raise asyncio.CancelledError from None
    except Exception as error:
        context.set_trailing_metadata(tuple(call.names))
        end_with(context, call.refusal(error))
    return b""


def _parsed(kind: type[Message], raw: bytes) -> Any:
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        problem = f"not a {kind.DESCRIPTOR.name}: malformed, or text that is not UTF-8"
        raise InvalidRequest([Violation("", problem)]) from error


def _refusal(error: Unauthenticated) -> MethodHandler:
    async def refuse(_messages: object, context: Context) -> None:
        end_with(context, error)

    # A method that takes a stream is called before the first message comes.
    return grpc.stream_unary_rpc_method_handler(refuse)


def end_with(context: Context, error: RequestError) -> None:
    """Give a call the status and the details with which it ends once its method returns.

    `context.abort` would leave an error and a call that refer to each other.
    """
    status = Status(code=grpc.StatusCode[error.status].value[0], message=str(error))
    status.details.append(pack(ErrorInfo(reason=error.reason, domain=DOMAIN)))
    if isinstance(error, InvalidRequest):
        fields = [BadRequest.FieldViolation(field=v.field, description=v.problem) for v in error.violations]
        status.details.append(pack(BadRequest(field_violations=fields)))
    elif isinstance(error, Overloaded):
        status.details.append(pack(RetryInfo(retry_delay=timedelta(seconds=error.retry_after_s))))
    details = (DETAILS_KEY, status.SerializeToString())
    context.set_code(grpc.StatusCode[error.status])
    context.set_details(str(error))
    context.set_trailing_metadata((*(context.trailing_metadata() or ()), details))
