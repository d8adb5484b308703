"""The client for asyncio: `Client`'s methods as coroutines and asynchronous iterators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Self, TypeVar, Unpack

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ppserve.client.connection import TimeLimit, Tls, call_metadata, open_channel
from ppserve.client.conversation import Conversation, Retries, RetryPolicy
from ppserve.client.failures import failure_of
from ppserve.client.values import Chunk, Completion, Options, Prompt, Token, completion_of, request_of, tokens_of
from ppserve.v1 import generation_pb2 as pb
from ppserve.v1.generation_pb2_grpc import GenerationServiceStub

R = TypeVar("R")


class AsyncClient:
    """One connection to a server, for one event loop. target: `host:port`. api_key: sent with every call."""

    def __init__(
        self,
        target: str = "127.0.0.1:50051",
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        self._retry = retry or RetryPolicy()
        self._metadata = call_metadata(api_key)
        self._channel = open_channel(aio.insecure_channel, aio.secure_channel, target, tls)
        self._stub = GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """The whole answer at once. Raises CallFailed."""
        return completion_of([chunk async for chunk in self.stream(prompt, **options)])

    async def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncIterator[Chunk]:
        """The answer as it is generated. Closing the iterator cancels the request. Raises CallFailed."""
        limit = TimeLimit(options.get("timeout_s"))
        conversation = Conversation(request_of(prompt, options), self._retry)
        while (request := conversation.next_request()) is not None:
            call = self._stub.Generate(request, timeout=limit.left_s, metadata=self._metadata)
            try:
                async for message in call:
                    yield conversation.take(message)
                conversation.check_end(request)
            except aio.AioRpcError as error:
                await asyncio.sleep(limit.pause(conversation.pause_after(failure_of(error))))
            finally:
                call.cancel()

    async def tokenize(self, text: str) -> tuple[Token, ...]:
        """The tokens that `generate` would see."""
        return tokens_of(await self._call(self._stub.Tokenize, pb.TokenizeRequest(text=text)))

    async def detokenize(self, ids: list[int]) -> str:
        """The text of tokens."""
        asked = pb.DetokenizeRequest(token_ids=pb.TokenIds(ids=ids))
        answer: pb.DetokenizeResponse = await self._call(self._stub.Detokenize, asked)
        return answer.text

    async def model_info(self) -> pb.GetModelInfoResponse:
        """Which model is served, and within which limits."""
        answer: pb.GetModelInfoResponse = await self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest())
        return answer

    async def topology(self) -> pb.GetTopologyResponse:
        """Which stage runs where, and where its time goes."""
        answer: pb.GetTopologyResponse = await self._call(self._stub.GetTopology, pb.GetTopologyRequest())
        return answer

    async def is_serving(self, service: str = "", timeout_s: float = 5.0) -> bool:
        """Whether the server answers that it serves. Raises CallFailed when there is no answer."""
        check = health_pb2_grpc.HealthStub(self._channel).Check
        try:
            answer = await check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except aio.AioRpcError as error:
            raise failure_of(error) from None
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        """Cancel what runs and close the connection."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(self, method: Callable[..., Awaitable[R]], request: object) -> R:
        """A unary call, tried again as the policy says."""
        retries = Retries(self._retry)
        while True:
            try:
                return await method(request, metadata=self._metadata)
            except aio.AioRpcError as error:
                await asyncio.sleep(retries.pause_after(failure_of(error)))
