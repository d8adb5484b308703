"""Bounds of the HTTP server: bodies, heads, bytes that are no request, connections."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import pytest
from starlette.types import Receive, Scope, Send

from ppserve.head.api.http.bodies import MAX_BODY_BYTES
from ppserve.head.api.http.responses import HttpError, status_of
from ppserve.head.listener import Listener
from tests.head.api.http.asking import Served, run

ASK = b"GET / HTTP/1.1\r\nhost: here\r\n\r\n"


def test_bodies_have_a_limit() -> None:
    async def scenario(served: Served) -> None:
        huge = {"prompt": "x" * MAX_BODY_BYTES}
        assert (await served.refusal(**huge))[0] == 413
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n")
        piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        for _ in range(MAX_BODY_BYTES // 0x10000 + 2):
            writer.write(piece)
        assert b" 413 " in await reader.readline()
        writer.close()
        assert (await served.ask("/health")).status == 200
        assert status_of(served.engine.refused[0]) == 413
        assert isinstance(served.engine.refused[0], HttpError)

    run(scenario)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /health HTTP/1.1\r\nx: " + b"y" * (32 << 10),
        b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nx\r\n",
        b"\x16\x03\x01\x02\r\n\r\n",
    ],
)
def test_bytes_that_are_no_request_are_the_caller_s_mistake(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(served: Served) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(sent)
        assert (await reader.readline()).startswith(b"HTTP/1.1 4")
        writer.close()
        assert (await served.ask("/health")).status == 200

    run(scenario)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def listening(answered: list[socket.socket]) -> Listener:
    """Room for two connections. answered: the sockets of those that have asked."""

    async def app(scope: Scope, _receive: Receive, send: Send) -> None:
        answered.append(scope["state"]["transport"].get_extra_info("socket"))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    return Listener(app, max_connections=3)


def test_connections_beyond_the_bound_are_told_so_until_one_leaves() -> None:
    async def main() -> None:
        answered: list[socket.socket] = []
        listener = listening(answered)
        port = await listener.start("127.0.0.1", 0, "--http-port")
        opened = []
        for expected in (b"200", b"200", b"503"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(ASK)
            assert expected in await reader.readline()
            opened.append((reader, writer))
        for _, writer in opened[1:]:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
        reader, writer = opened[0]
        status = b""
        while b"200" not in status:  # the server hears of the ends in time
            await reader.readuntil(b"\r\n\r\n")
            writer.write(ASK)
            status = await reader.readline()
        writer.close()
        await listener.stop()
        assert len(answered) == 3

    asyncio.run(main())


def test_small_events_do_not_wait_for_each_other() -> None:
    """asyncio switches Nagle's algorithm off only for sockets that name their protocol."""

    async def main() -> None:
        answered: list[socket.socket] = []
        listener = listening(answered)
        port = await listener.start("127.0.0.1", 0, "--http-port")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ASK)
        assert b"200" in await reader.readline()
        assert answered[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
        await listener.stop()

    asyncio.run(main())
