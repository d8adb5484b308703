"""Calls are taken in as they come, and a refused one leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct

import grpc
import pytest
from grpc import aio

from benchmarks.chaos.callers import END_HEADERS, END_STREAM, HEADERS, PING, frame, header
from ppserve.errors import Overloaded
from ppserve.head.api.grpc.eager import AHEAD, EagerServer
from ppserve.head.api.grpc.service import GrpcService
from ppserve.v1 import generation_pb2 as pb
from tests.fake_engine import FakeEngine, code_of, desk_of, stub_of

NUM_CALLS = 4 * AHEAD


def calls_that_have_come(port: int) -> socket.socket:
    """So many calls. gRPC's core has read them, since it answered a ping that came after; the event loop has not
    turned."""
    connection = socket.create_connection(("127.0.0.1", port))
    connection.settimeout(20)
    names = (b"\x83\x86", header(":path", "/a/b"), header(":authority", "x"), header("te", "trailers"))
    headers = b"".join(names) + header("content-type", "application/grpc")
    calls = (frame(HEADERS, END_HEADERS | END_STREAM, 1 + 2 * call, headers) for call in range(NUM_CALLS))
    ping = frame(PING, 0, 0, b"are-they")
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + b"".join(calls) + ping)
    answer = struct.pack(">I", 8)[1:] + bytes([PING, 1]) + bytes(4) + b"are-they"
    received = b""
    while answer not in received:
        received += connection.recv(4096)
    return connection


class Counts(grpc.GenericRpcHandler):
    """most: so many calls were taken in within one turn of the event loop."""

    def __init__(self) -> None:
        self.calls = self.before_turn = self.most = 0
        self.all_came = asyncio.Event()

    def service(self, _details: grpc.HandlerCallDetails) -> None:
        if self.calls == self.before_turn:
            asyncio.get_running_loop().call_soon(self._turned)
        self.calls += 1
        if self.calls == NUM_CALLS:
            self.all_came.set()

    def _turned(self) -> None:
        self.most = max(self.most, self.calls - self.before_turn)
        self.before_turn = self.calls


@pytest.mark.parametrize("is_eager", [True, False])
def test_many_calls_are_taken_in_within_one_turn_of_the_loop(is_eager: bool) -> None:
    """gRPC's own server takes in one at most."""

    async def main() -> int:
        server = EagerServer([], []) if is_eager else aio.server()
        counts = Counts()
        server.add_generic_rpc_handlers((counts,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        with calls_that_have_come(port):
            async with asyncio.timeout(20):
                await counts.all_came.wait()
        await server.stop(0)
        return counts.most

    most = asyncio.run(main())
    assert most > 3 if is_eager else most == 1


class Aborts(grpc.GenericRpcHandler):
    """Refuses with gRPC's own word for it."""

    def service(self, _details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def refuse(_raw: bytes, context: aio.ServicerContext) -> None:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED)

        return grpc.unary_stream_rpc_method_handler(refuse)


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_refused_call_is_gone_when_its_caller_is_told(is_ours: bool) -> None:
    """It would stay until the collector found it, which stops all streams meanwhile."""

    async def main() -> int:
        server = EagerServer([], [])
        request_handler = desk_of(FakeEngine(full=Overloaded("full", 1.0)))
        server.add_generic_rpc_handlers((GrpcService(request_handler).handlers() if is_ours else Aborts(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with stub_of(f"127.0.0.1:{port}") as stub:
            for _ in range(20):
                assert await code_of(stub.Generate(pb.GenerateRequest())) is grpc.StatusCode.RESOURCE_EXHAUSTED
        contexts = sum(type(one).__name__ == "_ServicerContext" for one in gc.get_objects())
        await server.stop(0)
        return contexts

    gc.collect()
    gc.disable()
    try:
        assert (asyncio.run(main()) < 10) is is_ours
    finally:
        gc.enable()
