"""The client for asyncio: `Client`'s methods as coroutines and asynchronous iterators."""

from __future__ import annotations

import asyncio
from typing import Any, Self

from grpc import aio

from ppserve.client.calls import Calls
from ppserve.client.connection import Tls, open_channel
from ppserve.client.conversation import RetryPolicy


class _Awaiting:
    """gRPC's interface for asyncio."""

    async def result(self, call: Any) -> Any:
        return await call

    async def next_message(self, call: Any) -> Any:
        message = await call.read()
        return None if message is aio.EOF else message

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class AsyncClient(Calls):
    """One connection to a server, for one event loop. target: `host:port`. api_key: sent with every call."""

    def __init__(
        self,
        target: str = "127.0.0.1:50051",
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        channel = open_channel(aio.insecure_channel, aio.secure_channel, target, tls)
        super().__init__(channel, _Awaiting(), api_key, retry)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()
