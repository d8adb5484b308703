"""The methods of `ppserve.v1.GenerationService`: a message in, the request handler's answer out as messages."""

from __future__ import annotations

import grpc

from ppserve.errors import Forbidden
from ppserve.head.api.call import Call
from ppserve.head.api.grpc.calls import Context, call_from, end_stream, parse, unary
from ppserve.head.api.grpc.messages import GenerateMessages, model_message, request_fields, topology_message
from ppserve.head.api.request_handler import RequestHandler, run_in_thread_if_long
from ppserve.v1 import generation_pb2 as pb

SERVICE_NAME = "ppserve.v1.GenerationService"


class GrpcService:
    """Answers calls with what the request handler says."""

    def __init__(self, request_handler: RequestHandler) -> None:
        self._request_handler = request_handler

    def handlers(self) -> grpc.GenericRpcHandler:
        """What a server registers."""
        answers = {
            "Tokenize": self._tokenize,
            "Detokenize": self._detokenize,
            "GetModelInfo": self._get_model_info,
            "GetTopology": self._get_topology,
            "RestartReplica": self._restart_replica,
        }
        to_bytes = pb.GenerateResponse.SerializeToString
        keys_are_checked = self._request_handler.keys is not None
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "Generate": grpc.unary_stream_rpc_method_handler(self._generate, response_serializer=to_bytes),
                **{name: unary(answer, keys_are_checked) for name, answer in answers.items()},
            },
        )

    async def _generate(self, raw: bytes, context: Context) -> None:
        handler = self._request_handler
        call = call_from(context, keys_are_checked=handler.keys is not None)
        try:
            with handler.counting_refusals():
                message = parse(pb.GenerateRequest, raw)
                call = call.named(message.request_id, handler.description.limits.max_request_id_bytes)
            context.set_trailing_metadata(tuple(call.names))
            async with handler.generate(*request_fields(message), call) as stream:
                messages = GenerateMessages(stream.request, call.request_id, handler.token_bytes)
                async for delta in stream.deltas():
                    await context.write(messages.message(delta))
        except Exception as error:
            end_stream(context, call, error)

    async def _tokenize(self, raw: bytes, _call: Call) -> pb.TokenizeResponse:
        ids = await self._request_handler.tokenize("text", parse(pb.TokenizeRequest, raw).text)
        token_bytes = self._request_handler.token_bytes

        def answer() -> pb.TokenizeResponse:
            return pb.TokenizeResponse(tokens=[pb.TokenInfo(id=i, bytes=token_bytes(i)) for i in ids])

        return await run_in_thread_if_long(len(ids), answer)

    async def _detokenize(self, raw: bytes, _call: Call) -> pb.DetokenizeResponse:
        ids = list(parse(pb.DetokenizeRequest, raw).token_ids.ids)
        text, content = await self._request_handler.detokenize("token_ids.ids", ids)
        return pb.DetokenizeResponse(text=text, bytes=content)

    async def _get_model_info(self, raw: bytes, _call: Call) -> pb.GetModelInfoResponse:
        parse(pb.GetModelInfoRequest, raw)
        return model_message(self._request_handler.description)

    async def _get_topology(self, raw: bytes, _call: Call) -> pb.GetTopologyResponse:
        parse(pb.GetTopologyRequest, raw)
        return topology_message(await self._request_handler.topology())

    async def _restart_replica(self, raw: bytes, call: Call) -> pb.RestartReplicaResponse:
        parsed = parse(pb.RestartReplicaRequest, raw)
        if not call.is_local:
            raise Forbidden("only callers on the head's own host may restart a replica")
        await self._request_handler.restart(parsed.replica, parsed.pauses)
        return pb.RestartReplicaResponse()
