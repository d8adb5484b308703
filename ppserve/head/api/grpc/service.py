"""The methods of `ppserve.v1.GenerationService`: a message in, the handler's answer out."""

from __future__ import annotations

from collections.abc import AsyncIterator

from ppserve.answers import Chat
from ppserve.errors import Forbidden
from ppserve.head.api.asked_chat import AskedChat
from ppserve.head.api.call import Call
from ppserve.head.api.grpc.described import model_message, topology_message
from ppserve.head.api.grpc.messages import delta_message, request_options
from ppserve.head.api.request_handler import RequestHandler, run_in_thread_if_long
from ppserve.head.api.stream import deltas_of
from ppserve.v1 import generation_pb2 as pb


class GenerationService:
    """Our own protocol, on the request handler."""

    descriptor = pb.DESCRIPTOR.services_by_name["GenerationService"]

    def __init__(self, handler: RequestHandler) -> None:
        self._handler = handler

    async def Generate(self, message: pb.GenerateRequest, call: Call) -> AsyncIterator[pb.GenerateResponse]:
        with self._handler.counting_refusals():
            given, prompt = request_options(message)
            if isinstance(prompt, Chat):
                prompt, _ = await self._handler.chat_prompt(AskedChat.of(prompt, "chat.messages"), call.caller)
        async with self._handler.generate(given, prompt, call) as stream:
            async for _, delta in deltas_of([stream]):
                yield delta_message(delta, stream.request, call.request_id, self._handler.tokenizer)

    async def Tokenize(self, message: pb.TokenizeRequest, _call: Call) -> pb.TokenizeResponse:
        ids = await self._handler.tokenize("text", message.text)
        token_bytes = self._handler.tokenizer.token_bytes
        return await run_in_thread_if_long(
            len(ids), lambda: pb.TokenizeResponse(tokens=[pb.TokenInfo(id=i, bytes=token_bytes(i)) for i in ids])
        )

    async def Detokenize(self, message: pb.DetokenizeRequest, _call: Call) -> pb.DetokenizeResponse:
        text, content = await self._handler.detokenize("token_ids.ids", list(message.token_ids.ids))
        return pb.DetokenizeResponse(text=text, bytes=content)

    async def GetModelInfo(self, _message: pb.GetModelInfoRequest, _call: Call) -> pb.GetModelInfoResponse:
        return model_message(self._handler.description)

    async def GetTopology(self, _message: pb.GetTopologyRequest, _call: Call) -> pb.GetTopologyResponse:
        return topology_message(await self._handler.topology(), self._handler.metrics_port)

    async def RestartReplica(self, message: pb.RestartReplicaRequest, call: Call) -> pb.RestartReplicaResponse:
        if not call.is_local:
            raise Forbidden("only callers on the head's own host may restart a replica")
        await self._handler.restart(message.replica, message.pauses)
        return pb.RestartReplicaResponse()
