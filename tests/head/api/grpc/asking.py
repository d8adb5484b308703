"""What is asked of a real gRPC server in this process, whose engine has no model, and how it fails."""

from __future__ import annotations

from collections.abc import AsyncIterable

import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from grpc import aio
from grpc_status import rpc_status

from ppserve.v1 import generation_pb2 as pb


def ask(max_tokens: int = 5, text: str = "hello", **fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, stop=pb.StopConditions(max_tokens=max_tokens), **fields)


async def failure_of(call: AsyncIterable[object]) -> aio.AioRpcError:
    """Return the error with which a stream fails."""
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
