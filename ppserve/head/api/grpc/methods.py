"""What the methods of every gRPC service share: parsing, errors as statuses, and the metadata of answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc import aio

from ppserve.errors import InvalidRequest, Violation
from ppserve.head.api.call import Call
from ppserve.head.api.grpc.calls import call_from
from ppserve.head.api.grpc.status import abort

Context = aio.ServicerContext[Any, Any]
M = TypeVar("M", bound=Message)


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
            await abort(context, call.refusal(error))

    return grpc.unary_unary_rpc_method_handler(method)
