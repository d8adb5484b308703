"""What surrounds a gRPC call's message: whose call it is, whether it may enter, until when it waits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import grpc
from grpc import aio

from ppserve.errors import Unauthenticated
from ppserve.head.api.auth import ApiKeys, bearer_key, caller_name
from ppserve.head.api.call import Call
from ppserve.head.api.grpc.status import abort

Metadata = Iterable[tuple[str, str | bytes]] | None

OPEN_SERVICES = ("/grpc.health.v1.Health/",)


_LOCAL_PEERS = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", "ipv6:[::ffff:127.", "ipv6:%5B::ffff:127.", "unix:")


class KeyCheck(aio.ServerInterceptor):
    """Refuses every call without an accepted key, health excepted.

    It stands before the method is even looked up, so a new method cannot be forgotten.
    """

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        if not handler_call_details.method.startswith(OPEN_SERVICES):
            try:
                self._keys.check(_key(handler_call_details.invocation_metadata))
            except Unauthenticated as error:
                return _refusal(error)
        return await continuation(handler_call_details)


def call_from(context: aio.ServicerContext[Any, Any], keys_are_checked: bool) -> Call:
    """The call as the desk sees it. Call this when it comes in: its deadline counts from now."""
    metadata = context.invocation_metadata()
    key = _key(metadata) if keys_are_checked else None
    certificate = b",".join(context.peer_identities() or ())
    caller = caller_name(key, certificate, context.peer().rpartition(":")[0])
    call = Call.begin(caller, context.time_remaining(), next(_texts(metadata, "traceparent"), None))
    return replace(call, is_local=context.peer().startswith(_LOCAL_PEERS))


def _key(metadata: Metadata) -> str | None:
    keys = map(bearer_key, _texts(metadata, "authorization"))
    return next((key for key in keys if key is not None), None)


def _texts(metadata: Metadata, name: str) -> Iterator[str]:
    return (value for key, value in metadata or () if key == name and isinstance(value, str))


def _refusal(error: Unauthenticated) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(_request: bytes, context: aio.ServicerContext[Any, Any]) -> bytes:
        await abort(context, error)

    return grpc.unary_unary_rpc_method_handler(refuse)
