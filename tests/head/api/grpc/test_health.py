"""Watchers of health hear of every change, also after another one has left."""

from __future__ import annotations

import asyncio

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.fake_engine import FakeEngine, code_of, served

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
connected = aio.insecure_channel


async def watched(channel: aio.Channel) -> tuple[aio.UnaryStreamCall, int]:
    """A watcher, and what it was told first."""
    call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    return call, (await call.read()).status


def test_when_a_watcher_leaves_the_others_still_hear() -> None:
    async def main() -> None:
        async with asyncio.timeout(30), served(FakeEngine()) as (door, target), connected(target) as channel:
            (leaves, _), (stays, told) = await watched(channel), await watched(channel)
            assert told == SERVING
            leaves.cancel()
            await code_of(leaves.code())
            health = health_pb2_grpc.HealthStub(channel)
            for state in (NOT_SERVING, SERVING):
                # A call that comes after the cancellation has been answered: the server knows of both.
                await health.Check(health_pb2.HealthCheckRequest())
                await door.set_serving(state == SERVING)
                assert (await stays.read()).status == state

    asyncio.run(main())
