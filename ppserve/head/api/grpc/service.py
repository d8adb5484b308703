"""The methods of `ppserve.v1.GenerationService`: a message in, the desk's answer out as messages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc import aio

from ppserve.errors import InvalidRequest, Violation
from ppserve.head.api.call import Call
from ppserve.head.api.desk import FrontDesk, aside
from ppserve.head.api.grpc.calls import call_from
from ppserve.head.api.grpc.convert import asked_from
from ppserve.head.api.grpc.messages import GenerateMessages, model_message, topology_message
from ppserve.head.api.grpc.status import abort
from ppserve.v1 import generation_pb2 as pb

log = logging.getLogger(__name__)

SERVICE_NAME = "ppserve.v1.GenerationService"

Context = aio.ServicerContext[Any, Any]
UnaryMethod = Callable[[bytes, Context], Awaitable[bytes]]
M = TypeVar("M", bound=Message)


class GrpcService:
    """Answers calls with what the desk says."""

    def __init__(self, desk: FrontDesk) -> None:
        self._desk = desk

    def handlers(self) -> grpc.GenericRpcHandler:
        """What a server registers. Requests are parsed in the calls, so that bad bytes get a proper status."""
        stream = grpc.unary_stream_rpc_method_handler
        unary = grpc.unary_unary_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "Generate": stream(self._generate, response_serializer=pb.GenerateResponse.SerializeToString),
                "Tokenize": unary(self._guarded(self._tokenize)),
                "Detokenize": unary(self._guarded(self._detokenize)),
                "GetModelInfo": unary(self._guarded(self._get_model_info)),
                "GetTopology": unary(self._guarded(self._get_topology)),
            },
        )

    async def _generate(self, raw: bytes, context: Context) -> None:
        call = self._call(context)
        try:
            message = _parse(pb.GenerateRequest, raw)
            call = self._desk.name(call, message.request_id)
            context.set_trailing_metadata(_returned(call))
            async with self._desk.generate(asked_from(message), call) as stream:
                messages = GenerateMessages(stream.request, call.request_id, self._desk.token_bytes)
                async for delta in stream.deltas():
                    await context.write(messages.message(delta))
        except aio.BaseError:
            log.debug("the caller went away in the middle of a write", extra=call.trace)
            raise asyncio.CancelledError from None
        except Exception as error:
            await abort(context, call.refusal(error))

    async def _tokenize(self, raw: bytes) -> pb.TokenizeResponse:
        ids = await self._desk.tokenize("text", _parse(pb.TokenizeRequest, raw).text)
        token_bytes = self._desk.token_bytes

        def answer() -> pb.TokenizeResponse:
            return pb.TokenizeResponse(tokens=[pb.TokenInfo(id=i, bytes=token_bytes(i)) for i in ids])

        return await aside(len(ids), answer)

    async def _detokenize(self, raw: bytes) -> pb.DetokenizeResponse:
        ids = list(_parse(pb.DetokenizeRequest, raw).token_ids.ids)
        text, content = await self._desk.detokenize("token_ids.ids", ids)
        return pb.DetokenizeResponse(text=text, bytes=content)

    async def _get_model_info(self, raw: bytes) -> pb.GetModelInfoResponse:
        _parse(pb.GetModelInfoRequest, raw)
        return model_message(self._desk.card)

    async def _get_topology(self, raw: bytes) -> pb.GetTopologyResponse:
        _parse(pb.GetTopologyRequest, raw)
        return topology_message(await self._desk.topology())

    def _guarded(self, answer: Callable[[bytes], Awaitable[Message]]) -> UnaryMethod:
        """A unary method: errors become statuses, messages become bytes."""

        async def method(raw: bytes, context: Context) -> bytes:
            try:
                return (await answer(raw)).SerializeToString()
            except Exception as error:
                await abort(context, self._call(context).refusal(error))

        return method

    def _call(self, context: Context) -> Call:
        return call_from(context, keys_are_checked=self._desk.keys is not None)


def _parse(kind: type[M], raw: bytes) -> M:
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        problem = f"not a {kind.DESCRIPTOR.name}: malformed, or text that is not UTF-8"
        raise InvalidRequest([Violation("", problem)]) from error


def _returned(call: Call) -> tuple[tuple[str, str], ...]:
    """The metadata that goes back with every answer."""
    named = {"x-request-id": call.request_id, "traceparent": call.traceparent}
    return tuple((name, value) for name, value in named.items() if value is not None)
