"""Watchers of health: those that leave, and those that do not read, hold nobody up."""

from __future__ import annotations

import asyncio
import struct

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.fake_engine import FakeEngine, code_of, served
from tests.http2 import END_HEADERS, END_STREAM, HEADERS, INITIAL_WINDOW_SIZE, SETTINGS, frame, header

WATCH = "/grpc.health.v1.Health/Watch"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
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


def test_a_watcher_who_does_not_read_keeps_nothing_from_changing() -> None:
    """Its window holds no byte, so what is written to it waits for ever."""

    async def main() -> None:
        async with asyncio.timeout(30), served(FakeEngine()) as (door, target):
            writer = await deaf_watcher(target)
            async with connected(target) as channel:
                health = health_pb2_grpc.HealthStub(channel)
                for state in (NOT_SERVING, SERVING):
                    await door.set_serving(state == SERVING)
                    assert (await health.Check(health_pb2.HealthCheckRequest())).status == state
            writer.close()

    asyncio.run(main())


async def deaf_watcher(target: str) -> asyncio.StreamWriter:
    """One whose call the server has begun to answer."""
    host, _, port = target.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    names = (b"\x83\x86", header(":path", WATCH), header(":authority", "x"), header("te", "trailers"))
    headers = b"".join(names) + header("content-type", "application/grpc")
    writer.write(PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, 0)))
    writer.write(frame(HEADERS, END_HEADERS, 1, headers) + frame(0, END_STREAM, 1, bytes(5)))
    while True:
        head = await reader.readexactly(9)
        await reader.readexactly(int.from_bytes(head[:3], "big"))
        if head[3] == HEADERS:
            return writer
