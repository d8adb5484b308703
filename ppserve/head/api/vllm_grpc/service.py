"""The methods of `vllm.grpc.engine.VllmEngine`.

Embed and SubscribeKvEvents are missing on purpose: gRPC answers them with UNIMPLEMENTED, as routers expect."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

import grpc

from ppserve.errors import InvalidRequest, Violation
from ppserve.head.api.call import Call
from ppserve.head.api.grpc.calls import Context, call_from, end_stream, parse, unary
from ppserve.head.api.request_handler import RequestHandler
from ppserve.head.api.stream import deltas_in_time
from ppserve.head.api.vllm_grpc.convert import in_words_of, request_fields
from ppserve.head.api.vllm_grpc.messages import SequenceMessages
from ppserve.head.api.vllm_grpc.tokenizer_files import archive, chunks
from ppserve.vllm import engine_pb2 as pb

# Routers take what is here for a directory or the name of a model on a hub, whose tokenizer may be another one. No
# path and no name, it makes them call GetTokenizer.
TOKENIZER_PLACE = "grpc:GetTokenizer"


class VllmService:
    """Answers calls with what the request handler says. is_serving: what HealthCheck says; set from outside."""

    name = "vllm.grpc.engine.VllmEngine"

    def __init__(self, request_handler: RequestHandler, chat_template: Path | None) -> None:
        self.is_serving = False
        self._request_handler = request_handler
        self._chat_template = None if chat_template is None else chat_template.read_text()
        self._started_s = time.monotonic()
        self._archive: bytes | None = None

    def handlers(self) -> grpc.GenericRpcHandler:
        """What a server registers."""
        stream = grpc.unary_stream_rpc_method_handler
        answers = {
            "HealthCheck": self._health_check,
            "Abort": self._abort,
            "GetModelInfo": self._get_model_info,
            "GetServerInfo": self._get_server_info,
            "GetLoads": self._get_loads,
        }
        keys_are_checked = self._request_handler.keys is not None
        return grpc.method_handlers_generic_handler(
            self.name,
            {
                "Generate": stream(self._generate, response_serializer=pb.GenerateResponse.SerializeToString),
                "GetTokenizer": stream(
                    self._get_tokenizer, response_serializer=pb.GetTokenizerChunk.SerializeToString
                ),
                **{name: unary(answer, keys_are_checked) for name, answer in answers.items()},
            },
        )

    async def _generate(self, raw: bytes, context: Context) -> None:
        handler, message = self._request_handler, pb.GenerateRequest()
        call = call_from(context, keys_are_checked=handler.keys is not None)
        try:
            with handler.counting_refusals():
                message = parse(pb.GenerateRequest, raw)
                call = call.named(message.request_id, handler.description.limits.max_request_id_bytes)
                given, prompt = request_fields(message)
            context.set_trailing_metadata(tuple(call.names))
            async with handler.generate(given, prompt, call) as stream:
                messages = SequenceMessages(stream.request, message.stream)
                async for _, delta in deltas_in_time([stream]):
                    for answer in messages.answers(delta):
                        await context.write(answer)
        except InvalidRequest as error:
            end_stream(context, call, in_words_of(message, error))
        except Exception as error:
            end_stream(context, call, error)

    async def _get_tokenizer(self, raw: bytes, context: Context) -> None:
        call = call_from(context, keys_are_checked=self._request_handler.keys is not None)
        try:
            parse(pb.GetTokenizerRequest, raw)
            for chunk in chunks(await self._tokenizer_archive()):
                await context.write(chunk)
        except Exception as error:
            end_stream(context, call, error)

    async def _tokenizer_archive(self) -> bytes:
        """Made when it is first asked for. Raises InvalidRequest without a tokenizer."""
        if self._archive is None:
            content = await self._request_handler.tokenizer_json()
            if content is None:
                raise InvalidRequest([Violation("", "this model has no tokenizer: send tokenized.input_ids")])
            description = self._request_handler.description
            special = b"" if description.eos_id is None else self._request_handler.token_bytes(description.eos_id)
            end_of_text = special.decode("utf-8", "replace")
            self._archive = archive(description, content, end_of_text, self._chat_template)
        return self._archive

    async def _health_check(self, raw: bytes, _call: Call) -> pb.HealthCheckResponse:
        parse(pb.HealthCheckRequest, raw)
        problem = "a stage is away, or the server is shutting down"
        return pb.HealthCheckResponse(healthy=self.is_serving, message="" if self.is_serving else problem)

    async def _abort(self, raw: bytes, call: Call) -> pb.AbortResponse:
        self._request_handler.abort(frozenset(parse(pb.AbortRequest, raw).request_ids), call.caller)
        return pb.AbortResponse()

    async def _get_model_info(self, raw: bytes, _call: Call) -> pb.GetModelInfoResponse:
        parse(pb.GetModelInfoRequest, raw)
        description = self._request_handler.description
        return pb.GetModelInfoResponse(
            model_path=description.name,
            is_generation=True,
            max_context_length=description.max_context,
            vocab_size=description.architecture.vocab_size,
            served_model_name=description.name,
            tokenizer_path=TOKENIZER_PLACE if description.has_tokenizer else "",
            model_type="gpt2",
            architectures=["GPT2LMHeadModel"],
            eos_token_ids=[] if description.eos_id is None else [description.eos_id],
            bos_token_id=description.eos_id or 0,
            max_req_input_len=description.max_context,
        )

    async def _get_server_info(self, raw: bytes, _call: Call) -> pb.GetServerInfoResponse:
        parse(pb.GetServerInfoRequest, raw)
        return pb.GetServerInfoResponse(
            active_requests=self._request_handler.num_open_streams,
            uptime_seconds=time.monotonic() - self._started_s,
            server_type="vllm-grpc",
            data_parallel_size=1,
        )

    async def _get_loads(self, raw: bytes, _call: Call) -> pb.GetLoadsResponse:
        parse(pb.GetLoadsRequest, raw)
        load = await self._request_handler.load()
        scheduler = pb.SchedulerLoad(
            num_running_reqs=load.running,
            num_waiting_reqs=load.waiting,
            num_total_reqs=load.running + load.waiting,
            num_used_tokens=round(load.kv_usage * load.kv_tokens),
            max_total_num_tokens=load.kv_tokens,
            token_usage=load.kv_usage,
            max_running_requests=load.max_running,
        )
        now = datetime.now(UTC).isoformat()
        return pb.GetLoadsResponse(
            timestamp=now, version=self._request_handler.description.version, dp_rank_count=1, loads=[scheduler]
        )
