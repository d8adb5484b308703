"""The methods of `vllm.grpc.engine.VllmEngine`.

Embed and SubscribeKvEvents are missing: routers expect UNIMPLEMENTED.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import time
import zipfile
from collections.abc import AsyncIterator
from datetime import UTC, datetime

from ppserve.errors import InvalidRequest
from ppserve.head.api.call import Call
from ppserve.head.api.request_handler import NOT_SERVING, RequestHandler
from ppserve.head.api.requests import renamed
from ppserve.head.api.stream import deltas_of, ordered_deltas_of
from ppserve.head.api.vllm_grpc.messages import SequenceMessages, load_message, names_of, request_options
from ppserve.vllm import engine_pb2 as pb

# It names neither a directory nor a hub's model, so that routers call GetTokenizer.
TOKENIZER_PLACE = "grpc:GetTokenizer"
CHUNK_BYTES = 256 << 10


class VllmService:
    """vLLM's protocol, on the request handler."""

    descriptor = pb.DESCRIPTOR.services_by_name["VllmEngine"]

    def __init__(self, handler: RequestHandler) -> None:
        self._handler = handler
        self._started_s = time.monotonic()

    async def Generate(self, message: pb.GenerateRequest, call: Call) -> AsyncIterator[pb.GenerateResponse]:
        try:
            with self._handler.counting_refusals():
                given, prompt = request_options(message)
            async with self._handler.generate(given, prompt, call, deadline_is_error=True) as stream:
                messages = SequenceMessages(stream.request, message.stream)
                # Routers number unstreamed answers as they arrive.
                deltas = deltas_of if message.stream else ordered_deltas_of
                async for _, delta in deltas([stream]):
                    for answer in messages.answers(delta):
                        yield answer
        except InvalidRequest as error:
            raise renamed(error, names_of(message), "sampling_params.") from None

    async def GetTokenizer(
        self, _message: pb.GetTokenizerRequest, _call: Call
    ) -> AsyncIterator[pb.GetTokenizerChunk]:
        content = await asyncio.to_thread(tokenizer_archive, self._handler)
        for offset in range(0, len(content), CHUNK_BYTES):
            end = offset + CHUNK_BYTES
            digest = hashlib.sha256(content).hexdigest() if end >= len(content) else ""
            yield pb.GetTokenizerChunk(data=content[offset:end], sha256=digest)

    async def HealthCheck(self, _message: pb.HealthCheckRequest, _call: Call) -> pb.HealthCheckResponse:
        is_serving = self._handler.is_serving
        return pb.HealthCheckResponse(healthy=is_serving, message="" if is_serving else NOT_SERVING)

    async def Abort(self, message: pb.AbortRequest, call: Call) -> pb.AbortResponse:
        self._handler.abort(frozenset(message.request_ids), call.caller)
        return pb.AbortResponse()

    async def GetModelInfo(self, _message: pb.GetModelInfoRequest, _call: Call) -> pb.GetModelInfoResponse:
        description = self._handler.description
        (kind, architecture) = model_kind(self._handler)
        first = description.chat_format.tokens.get("bos_token", "")
        return pb.GetModelInfoResponse(
            model_path=description.name,
            is_generation=True,
            max_context_length=description.max_context,
            vocab_size=description.architecture.vocab_size,
            served_model_name=description.name,
            tokenizer_path=TOKENIZER_PLACE if description.has_tokenizer else "",
            model_type=kind,
            architectures=[architecture],
            eos_token_ids=description.architecture.eos_ids,
            bos_token_id=self._handler.tokenizer.special_ids.get(first, 0),
            max_req_input_len=description.max_context,
        )

    async def GetServerInfo(self, _message: pb.GetServerInfoRequest, _call: Call) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(
            active_requests=self._handler.num_open_streams,
            uptime_seconds=time.monotonic() - self._started_s,
            server_type="vllm-grpc",
            data_parallel_size=1,
        )

    async def GetLoads(self, _message: pb.GetLoadsRequest, _call: Call) -> pb.GetLoadsResponse:
        load = load_message(await self._handler.snapshot())
        now = datetime.now(UTC).isoformat()
        version = self._handler.description.version
        return pb.GetLoadsResponse(timestamp=now, version=version, dp_rank_count=1, loads=[load])


def model_kind(handler: RequestHandler) -> tuple[str, str]:
    """Return Hugging Face's `model_type` and class of the model. A Mistral is served as a Llama."""
    arch = handler.description.architecture
    return arch.model_type, arch.model_class


def tokenizer_archive(handler: RequestHandler) -> bytes:
    """Return a zip of what routers need to tokenize. Raises InvalidRequest without a tokenizer."""
    described = handler.tokenizer_config()
    arch = handler.description.architecture
    config = {"model_type": model_kind(handler)[0], "vocab_size": arch.vocab_size, "eos_token_id": arch.eos_ids}
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("tokenizer.json", handler.tokenizer.to_json())
        zipped.writestr("tokenizer_config.json", json.dumps(described))
        zipped.writestr("config.json", json.dumps(config))
        if handler.template is not None:
            zipped.writestr("chat_template.jinja", handler.template.source)
    return content.getvalue()
