"""The client for ordinary code. Safe to use from several threads."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

import grpc

from ppserve.answers import Chunk, Options, Prompt
from ppserve.client.calls import AsyncClient, CallStyle
from ppserve.client.connection import Tls
from ppserve.client.conversation import RetryPolicy

P = ParamSpec("P")
R = TypeVar("R")


class _Blocking(CallStyle):
    """gRPC's blocking interface: these coroutines never suspend."""

    library: Any = grpc

    async def result(self, call: Any) -> Any:
        return call  # it was made when it returned

    async def next_message(self, call: Any) -> Any:
        return next(call, None)

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class _BlockingCalls(AsyncClient):
    _style = _Blocking()


def _run(awaitable: Awaitable[R]) -> R:
    """The result of a coroutine that never suspends, so no event loop is needed."""
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
    """One connection to a server. target: `host:port`. api_key: sent with every call."""

    def __init__(
        self,
        target: str = "127.0.0.1:50051",
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        self._calls = _BlockingCalls(target, api_key=api_key, tls=tls, retry=retry)

    generate = _blocking(AsyncClient.generate)
    tokenize = _blocking(AsyncClient.tokenize)
    detokenize = _blocking(AsyncClient.detokenize)
    model_info = _blocking(AsyncClient.model_info)
    topology = _blocking(AsyncClient.topology)
    restart = _blocking(AsyncClient.restart)
    is_serving = _blocking(AsyncClient.is_serving)
    close = _blocking(AsyncClient.close)

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Iterator[Chunk]:
        """The answer as it is generated. Closing the iterator cancels the request. Raises CallFailed."""
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
