"""Calls that never send their message, and listeners who do not listen, hold little and nobody up."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.chaos.callers import END_HEADERS, END_STREAM, HEADERS, INITIAL_WINDOW_SIZE, SETTINGS, frame, header
from ppserve.config import ServerSettings
from ppserve.head.api.grpc.eager import EagerServer
from ppserve.head.api.grpc.health import Health
from ppserve.head.api.grpc.holding import HeldCalls, LimitedPlaces, NoPlace
from ppserve.head.api.grpc.server import server_options
from ppserve.head.api.grpc.service import GrpcService
from ppserve.head.limits import Limits
from ppserve.v1 import generation_pb2 as pb
from tests.fake_engine import FakeEngine, code_of, desk_of, served, stub_of

GENERATE, TOKENIZE = (f"/ppserve.v1.GenerationService/{name}" for name in ("Generate", "Tokenize"))
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
connected = aio.insecure_channel
LONG_S = 3600.0


@asynccontextmanager
async def holding(**bounds: float) -> AsyncIterator[str]:
    """A server with such bounds; its target."""
    door = EagerServer([HeldCalls(**bounds)], [])
    door.add_generic_rpc_handlers((GrpcService(desk_of(FakeEngine())).handlers(),))
    health_pb2_grpc.add_HealthServicer_to_server(Health(()), door)
    port = door.add_insecure_port("127.0.0.1:0")
    await door.start()
    try:
        async with asyncio.timeout(30):
            yield f"127.0.0.1:{port}"
    finally:
        await door.stop(0)


@pytest.mark.parametrize("method", [GENERATE, TOKENIZE, CHECK, WATCH])
def test_a_call_that_sends_no_message_is_ended(method: str) -> None:
    async def main() -> None:
        async with holding(message_within_s=0.05) as target, connected(target) as channel:
            call = channel.stream_stream(method)()
            assert await code_of(call) is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "did not come within" in await call.details()

    asyncio.run(main())


@pytest.mark.parametrize("method", [GENERATE, TOKENIZE, CHECK])
def test_a_call_that_says_that_it_has_no_message_is_refused(method: str) -> None:
    async def main() -> None:
        async with holding() as target, connected(target) as channel:
            call = channel.stream_stream(method)()
            await call.done_writing()
            assert await code_of(call) is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(main())


@pytest.mark.parametrize("method", [TOKENIZE, CHECK, WATCH, REFLECT])
def test_a_damaged_message_is_the_caller_s_mistake(method: str) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), served(FakeEngine()) as (_, target), connected(target) as channel:
            call = channel.stream_stream(method)()
            await call.write(b"\xff")
            assert await code_of(call) is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(main())


def test_without_a_key_no_message_is_waited_for(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("0123456789abcdef\n")

    async def main() -> None:
        settings = ServerSettings(port=0, api_key_file=keys)
        async with served(FakeEngine(), settings) as (_, target), connected(target) as channel:
            async with asyncio.timeout(30):
                for method in (GENERATE, TOKENIZE, "/no.such.Service/Method"):
                    call = channel.stream_stream(method)()
                    assert await code_of(call) is grpc.StatusCode.UNAUTHENTICATED

    asyncio.run(main())


def test_when_too_many_messages_are_waited_for_the_oldest_call_is_ended() -> None:
    async def main() -> None:
        async with holding(message_within_s=LONG_S, max_incomplete=3) as target, stub_of(target) as stub:
            async with connected(target) as channel:
                calls = []
                for _ in range(8):
                    calls.append(channel.stream_stream(GENERATE)())
                    # One by one: the server has seen this call when it has answered a later one.
                    await stub.Tokenize(pb.TokenizeRequest(text="a"))
                ended = [await code_of(call) for call in calls[:5]]
                assert ended == [grpc.StatusCode.UNAVAILABLE] * 5
                assert await calls[0].details() == "too many calls whose message has not come"
                assert not any(call.done() for call in calls[6:])

    asyncio.run(main())


def test_calls_to_health_take_no_place_of_others() -> None:
    """They need no key."""

    async def main() -> None:
        async with holding(message_within_s=LONG_S, max_incomplete=3) as target, connected(target) as channel:
            held = channel.stream_stream(GENERATE)()
            health = health_pb2_grpc.HealthStub(channel)
            calls = []
            for _ in range(8):
                calls.append(channel.stream_stream(CHECK)())
                await health.Check(health_pb2.HealthCheckRequest())
            assert await code_of(calls[0]) is grpc.StatusCode.UNAVAILABLE
            assert not held.done()

    asyncio.run(main())


def test_where_all_listen_a_new_listener_is_refused_before_it_hears_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever was told something asks again at once when it is ended: all would end each other for ever."""

    async def main() -> None:
        async with holding(max_listeners=2) as target, connected(target) as channel:
            old = [await watched(channel) for _ in range(2)]
            late = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            with pytest.raises(aio.AioRpcError, match="too many calls listen") as refused:
                await late.read()
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert not any(call.done() for call, _ in old)
        monkeypatch.setattr("ppserve.head.api.grpc.holding.LISTEN_AT_LEAST_S", 0.0)
        async with holding(max_listeners=2) as target, connected(target) as channel:
            (first, _), (second, _), (third, _) = [await watched(channel) for _ in range(3)]
            assert await first.code() is grpc.StatusCode.UNAVAILABLE
            assert not second.done()
            assert not third.done()

    asyncio.run(main())


def test_places_are_free_again() -> None:
    async def main() -> None:
        places = LimitedPlaces(2, None)
        for _ in range(10):
            async with places.hold():
                pass
        held = [asyncio.create_task(_stay(places)) for _ in range(5)]
        async with asyncio.timeout(30):
            while sum(task.done() for task in held) < 3:
                await asyncio.sleep(0)
        assert all(isinstance(task.exception(), NoPlace) for task in held[:3])
        assert [task.done() for task in held] == [True, True, True, False, False]
        for task in held:
            task.cancel()

    async def _stay(places: LimitedPlaces) -> None:
        async with places.hold():
            await asyncio.Event().wait()

    asyncio.run(main())


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


@asynccontextmanager
async def bounded(*options: tuple[str, int]) -> AsyncIterator[int]:
    """A server with these options in place of ours; its port."""
    ours = dict(server_options(Limits()))
    door = EagerServer([], list((ours | {name: value for name, value in options if name in ours}).items()))
    port = door.add_insecure_port("127.0.0.1:0")
    await door.start()
    try:
        async with asyncio.timeout(30):
            yield port
    finally:
        await door.stop(0)


def test_connections_beyond_the_bound_are_closed() -> None:
    async def main() -> None:
        async with bounded(("grpc.max_allowed_incoming_connections", 2)) as port:
            opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            assert all([await reader.readexactly(9) for reader, _ in opened])  # its settings
            late, late_writer = await asyncio.open_connection("127.0.0.1", port)
            assert await late.read() == b""
            for _, writer in (*opened, (late, late_writer)):
                writer.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("option", "sent"),
    [
        ("grpc.server_handshake_timeout_ms", b""),
        ("grpc.max_connection_idle_ms", PREFACE + frame(SETTINGS, 0, 0, b"")),
    ],
)
def test_a_connection_without_a_call_is_closed(option: str, sent: bytes) -> None:
    async def main() -> None:
        async with bounded((option, 100)) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            while await reader.read(100):
                pass
            writer.close()

    asyncio.run(main())
