"""A scenario against a real gRPC server in this process, with an engine that has no model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable

import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from grpc import aio
from grpc_status import rpc_status

from ppserve.v1 import generation_pb2 as pb
from ppserve.v1.generation_pb2_grpc import GenerationServiceStub
from tests.fake_engine import FakeEngine, served, stub_of


def run(scenario: Callable[[FakeEngine, GenerationServiceStub], Awaitable[None]], **engine: object) -> None:
    """Run a scenario against a server of its own."""

    async def main() -> None:
        fake = FakeEngine(**engine)
        async with asyncio.timeout(30), served(fake) as (_, target), stub_of(target) as stub:
            await scenario(fake, stub)

    asyncio.run(main())


def ask(max_tokens: int = 5, text: str = "hello", **fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, stop=pb.StopConditions(max_tokens=max_tokens), **fields)


async def failure_of(call: AsyncIterable[object]) -> aio.AioRpcError:
    """With what a stream fails."""
    with pytest.raises(aio.AioRpcError) as failure:
        [message async for message in call]
    return failure.value


def details(error: aio.AioRpcError) -> list[object]:
    """The unpacked google.rpc details of a failed call."""
    status = rpc_status.from_call(error)
    assert status is not None
    kinds = {kind.DESCRIPTOR.full_name: kind for kind in (BadRequest, ErrorInfo, RetryInfo)}
    unpacked = []
    for packed in status.details:
        detail = kinds[packed.TypeName()]()
        packed.Unpack(detail)
        unpacked.append(detail)
    return unpacked
