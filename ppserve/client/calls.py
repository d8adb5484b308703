"""The two clients: requests, retries, streams that resume.

Both are written once, as coroutines. `AsyncClient` is awaited. `Client` makes calls that block (`CallStyle`), so
each coroutine runs to its end, or to its next chunk, without an event loop.
"""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ppserve.answers import Chunk, Completion, Options, PromptOrChat, Token, completion_of, read_options
from ppserve.client.connection import TimeLimit, Tls, call_metadata, open_channel, refuse_other_kinds
from ppserve.client.conversation import Conversation, Retries, RetryPolicy
from ppserve.client.messages import read_failure, read_tokens, to_message
from ppserve.v1 import generation_pb2 as pb
from ppserve.v1.generation_pb2_grpc import GenerationServiceStub

P = ParamSpec("P")
R = TypeVar("R")


class CallStyle:
    """A way to call gRPC. This one uses its interface for asyncio."""

    library: Any = aio

    async def result(self, call: Any) -> Any:
        """Return the answer of a unary call. Raises grpc.RpcError if it fails."""
        return await call

    async def next_message(self, call: Any) -> Any:
        """Return the next message of a stream; None at its end. Raises grpc.RpcError if the stream fails."""
        message = await call.read()
        return None if message is aio.EOF else message

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class AsyncClient:
    """One connection to a server, for one event loop. target: `host:port`. api_key: sent with every call."""

    _style = CallStyle()

    def __init__(
        self,
        target: str = "127.0.0.1:50051",
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        refuse_other_kinds(api_key=(api_key, str), tls=(tls, Tls), retry=(retry, RetryPolicy))
        self._channel = channel = open_channel(self._style.library, target, tls)
        self._metadata = call_metadata(api_key)
        self._retry = retry or RetryPolicy()
        # Both stubs are made now, because making one for a closed channel ends the process (grpc 1.81).
        self._stub = GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        self._health = health_pb2_grpc.HealthStub(channel)

    async def complete(self, prompt: PromptOrChat, **options: Unpack[Options]) -> Completion:
        """Wait for the whole answer. Raises CallFailed after the last attempt, and TypeError or ValueError for an
        argument that cannot be sent."""
        return completion_of([chunk async for chunk in self.stream(prompt, **options)])

    def generate(self, prompt: PromptOrChat, **options: Unpack[Options]) -> Coroutine[Any, Any, Completion]:
        """Do the same as `complete`. It is the former name."""
        warnings.warn("generate is now called complete", DeprecationWarning, stacklevel=2)
        return self.complete(prompt, **options)

    async def stream(self, prompt: PromptOrChat, **options: Unpack[Options]) -> AsyncGenerator[Chunk, None]:
        """Yield the answer as it is generated. Closing the iterator cancels the request. Raises what `complete`
        raises."""
        asked = read_options(options)
        limit = TimeLimit(asked.get("timeout_s"))
        conversation = Conversation(to_message(prompt, asked), self._retry)
        while (request := conversation.next_request()) is not None:
            call = self._stub.Generate(request, timeout=limit.left_s, metadata=self._metadata)
            try:
                while (message := await self._style.next_message(call)) is not None:
                    yield conversation.record(message)
                conversation.check_end(request)
            except grpc.RpcError as error:
                pause_s = conversation.pause_after(read_failure(error), time.monotonic())
                await self._style.sleep(limit.pause(pause_s))
            finally:
                call.cancel()

    async def tokenize(self, text: str) -> tuple[Token, ...]:
        """Return the tokens that `complete` would make of this text. Raises CallFailed."""
        return read_tokens(await self._ask(self._stub.Tokenize, pb.TokenizeRequest(text=text)))

    async def detokenize(self, ids: list[int]) -> str:
        """Return the text of these token ids. Raises CallFailed."""
        asked = pb.DetokenizeRequest(token_ids=pb.TokenIds(ids=ids))
        return str((await self._ask(self._stub.Detokenize, asked)).text)

    async def model_info(self) -> pb.GetModelInfoResponse:
        """Return the served model and its limits. Raises CallFailed."""
        answer: pb.GetModelInfoResponse = await self._ask(self._stub.GetModelInfo, pb.GetModelInfoRequest())
        return answer

    async def topology(self) -> pb.GetTopologyResponse:
        """Return the stages, where each runs, and where its time went. Raises CallFailed."""
        answer: pb.GetTopologyResponse = await self._ask(self._stub.GetTopology, pb.GetTopologyRequest())
        return answer

    async def restart(self, replica: int, pauses: bool = False) -> None:
        """Restart a replica's stage processes, and return when it serves again. pauses: whether its streams may
        wait for it if no other replica serves. Raises CallFailed."""
        await self._ask(self._stub.RestartReplica, pb.RestartReplicaRequest(replica=replica, pauses=pauses))

    async def is_serving(self, service: str = "", timeout_s: float = 5.0) -> bool:
        """Return whether the server says that it serves. It is asked once. Raises CallFailed if it does not
        answer."""
        asked = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = await self._style.result(self._health.Check(asked, timeout=TimeLimit(timeout_s).left_s))
        except grpc.RpcError as error:
            raise read_failure(error) from None
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        """Cancel the calls that still run, and close the connection."""
        await self._style.result(self._channel.close())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def _ask(self, method: Callable[..., Any], request: object) -> Any:
        retries = Retries(self._retry)
        while True:
            try:
                return await self._style.result(method(request, metadata=self._metadata))
            except grpc.RpcError as error:
                await self._style.sleep(retries.pause_after(read_failure(error), time.monotonic()))


# ---- the client that blocks ----


class _Blocking(CallStyle):
    """A way to call gRPC through its blocking interface. These coroutines never suspend."""

    library: Any = grpc

    async def result(self, call: Any) -> Any:
        return call  # a blocking call returns its answer

    async def next_message(self, call: Any) -> Any:
        return next(call, None)

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class _BlockingCalls(AsyncClient):
    _style = _Blocking()


def _run(awaitable: Awaitable[R]) -> R:
    """Return the result of a coroutine that never suspends, so no event loop is needed."""
    try:
        next(awaitable.__await__())
    except StopIteration as end:
        result: R = end.value
        return result
    raise AssertionError("a blocking call has waited for an event loop")


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Client, P], R]:
    @wraps(method)
    def blocking(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return _run(method(client._calls, *args, **kwargs))

    return blocking


class Client:
    """One connection to a server, for blocking code in any threads. Its arguments are `AsyncClient`'s."""

    def __init__(
        self,
        target: str = "127.0.0.1:50051",
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        self._calls = _BlockingCalls(target, api_key=api_key, tls=tls, retry=retry)

    complete = _blocking(AsyncClient.complete)
    tokenize = _blocking(AsyncClient.tokenize)
    detokenize = _blocking(AsyncClient.detokenize)
    model_info = _blocking(AsyncClient.model_info)
    topology = _blocking(AsyncClient.topology)
    restart = _blocking(AsyncClient.restart)
    is_serving = _blocking(AsyncClient.is_serving)
    close = _blocking(AsyncClient.close)

    def generate(self, prompt: PromptOrChat, **options: Unpack[Options]) -> Completion:
        """Do the same as `complete`. It is the former name."""
        warnings.warn("generate is now called complete", DeprecationWarning, stacklevel=2)
        return self.complete(prompt, **options)

    def stream(self, prompt: PromptOrChat, **options: Unpack[Options]) -> Iterator[Chunk]:
        """Yield the answer as it is generated. Closing the iterator cancels the request. Raises what `complete`
        raises."""
        chunks = self._calls.stream(prompt, **options)
        try:
            while (chunk := _run(anext(chunks, None))) is not None:
                yield chunk
        finally:
            _run(chunks.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
