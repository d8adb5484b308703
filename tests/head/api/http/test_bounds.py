"""Bounds of the HTTP server: bodies, heads, bytes that are no request, connections."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import socket
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ppserve.head.api.http import exchange
from ppserve.head.api.http.failures import HttpError, status_of
from ppserve.head.listener import Bounds, Listener
from tests.certificates import make_certificates, needs_openssl
from tests.fake_engine import FakeEngine, desk_of
from tests.head.api.http.asking import Served, run


def test_bodies_have_a_limit() -> None:
    async def scenario(served: Served) -> None:
        huge = {"prompt": "x" * exchange.MAX_BODY_BYTES}
        assert (await served.refusal(**huge))[0] == 413
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n")
        piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        for _ in range(exchange.MAX_BODY_BYTES // 0x10000 + 2):
            writer.write(piece)
        assert b" 413 " in await reader.readline()
        writer.close()
        assert (await served.ask("/health")).status == 200

    run(scenario)


def test_a_body_that_dribbles_in_is_given_up() -> None:
    async def dribble() -> dict[str, object]:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b" ", "more_body": True}

    async def main() -> None:
        scope = {"headers": [], "client": None, "state": {"certificate": b""}}
        asking = exchange.Exchange(scope, dribble, never_sent, desk_of(FakeEngine()))
        with pytest.raises(HttpError, match="did not come within") as failure:
            await asking.read(msgspec.json.Decoder(dict), within_s=0.05)
        assert status_of(failure.value) == 408

    async def never_sent(_message: object) -> None:
        raise AssertionError("reading sends nothing")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"GET /health HTTP/1.1\r\nx: " + b"y" * (32 << 10), 431, "head_too_long"),
        (
            b"GET /a HTTP/1.1\r\nhost: a\r\nconnection: close\r\nx: " + b"y" * (32 << 10) + b"\r\n\r\n",
            431,
            "head_too_long",
        ),
        (b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400, "no_http"),
        (b"POST /tokenize HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\n\r\n", 400, "no_http"),
        (b"POST /tokenize HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nx\r\n", 400, "no_http"),
        (b"POST /nothing HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nx\r\n", 400, "no_http"),
        (b"HEAD /health HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nx\r\n", 400, None),
        (b"\x16\x03\x01\x02", 400, "no_http"),
    ],
)
def test_bytes_that_are_no_request_are_refused_in_the_form_of_all_errors(
    sent: bytes, status: int, code: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(served: Served) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(sent)
        answer = http.client.HTTPResponse(_Heard(await reader.read()))  # type: ignore[arg-type]
        answer.begin()
        assert answer.status == status
        assert code is None or json.load(answer)["error"]["code"] == code
        assert (answer.headers["x-request-id"] or "").startswith("req-")
        assert served.counted.answers["other", status] == 1
        writer.close()

    run(scenario)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_body_that_goes_wrong_after_its_answer_ends_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(served: Served) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(b"POST /nothing HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n")
        assert b" 404 " in await reader.readline()
        writer.write(b"x\r\n")
        await until_closed(reader)
        writer.close()

    run(scenario)
    assert "Fatal error" not in caplog.text


class _Heard:
    """What came over a connection, for the parser of the standard library."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def makefile(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self._content)


async def until_closed(reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionError):
        while await reader.read(100):
            pass


async def _listening(bounds: Bounds, size: int = 2, tls: ssl.SSLContext | None = None) -> tuple[Listener, int]:
    async def app(_scope: object, _receive: object, send: Any) -> None:
        length = str(size).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
        await send({"type": "http.response.body", "body": bytes(size)})

    listener = Listener(app, bounds, tls)
    return listener, await listener.start("127.0.0.1", 0, "--http-port")


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nx: ", b"GET / HTTP/1.1\r\n\r\n"])
def test_a_connection_that_asks_nothing_is_closed(sent: bytes) -> None:
    """Before its first request, in the middle of a head, and after an answer."""

    async def main() -> None:
        listener, port = await _listening(Bounds(head_within_s=0.1, idle_s=0.1))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        async with asyncio.timeout(20):
            await until_closed(reader)
        writer.close()
        await listener.stop()

    asyncio.run(main())


MORE_THAN_BUFFERS_HOLD = 16 << 20
ASK = b"GET / HTTP/1.1\r\nhost: here\r\n\r\n"


async def longest_waiting_go(
    within_s: float, tls: ssl.SSLContext | None = None, known: ssl.SSLContext | None = None
) -> None:
    """Of 50 that say nothing, when another asks and there is room for 10. known: whom that one trusts."""
    listener, port = await _listening(Bounds(connections=10), tls=tls)
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(50)]
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=known)
    writer.write(ASK)
    assert b"200 OK" in await reader.readline()
    async with asyncio.timeout(within_s):
        for old, _ in idle[:41]:
            await until_closed(old)
    assert not any(young.at_eof() for young, _ in idle[41:])
    for _, each in (*idle, (reader, writer)):
        each.close()
    await listener.stop()


def test_when_there_are_too_many_the_one_that_has_waited_longest_goes() -> None:
    asyncio.run(longest_waiting_go(within_s=20))


async def ask_and_do_not_read(port: int, times: int) -> asyncio.StreamWriter:
    """Nothing is taken from the socket. So its end is seen by a write that fails."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    _reader, writer = await asyncio.open_connection(sock=sock)
    writer.transport.pause_reading()
    writer.write(times * ASK)
    return writer


async def until_broken(writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while not writer.transport.is_closing():
            writer.write(b"x")
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("times", [1, 100])
def test_a_reader_who_takes_nothing_is_ended(times: int) -> None:
    """However many requests it has sent."""

    async def main() -> None:
        listener, port = await _listening(Bounds(unread_s=0.1), MORE_THAN_BUFFERS_HOLD)
        async with asyncio.timeout(20):
            await until_broken(await ask_and_do_not_read(port, times))
        await listener.stop()

    asyncio.run(main())


def test_readers_who_take_nothing_make_room_for_others() -> None:
    """Or nobody could look at the metrics while they last."""

    async def main() -> None:
        listener, port = await _listening(Bounds(connections=3), MORE_THAN_BUFFERS_HOLD)
        async with asyncio.timeout(20):
            deaf = [await ask_and_do_not_read(port, 100) for _ in range(3)]
            while len(listener._state.unread) < 3:
                await asyncio.sleep(0.01)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(ASK)
            assert b"200 OK" in await reader.readline()
            assert len(listener._state.connections) == 3
            writer.close()
            await listener.stop()  # with an answer that waits for its reader
            for each in deaf:
                await until_broken(each)

    asyncio.run(main())


def test_clients_who_keep_their_connections_lose_no_request_where_all_places_are_taken() -> None:
    async def main() -> None:
        listener, port = await _listening(Bounds(connections=50))

        async def client(all_have_asked: asyncio.Barrier) -> None:
            connection = None
            for number in range(5):
                reader, writer = connection or await asyncio.open_connection("127.0.0.1", port)
                writer.write(ASK)
                head = await reader.readuntil(b"\r\n\r\n")
                assert b"200 OK" in head
                assert await reader.readexactly(2) == bytes(2)
                connection = None if b"connection: close" in head else (reader, writer)
                if connection is None:
                    writer.close()
                if number == 0:
                    await all_have_asked.wait()
            writer.close()

        barrier = asyncio.Barrier(50)
        async with asyncio.timeout(20), asyncio.TaskGroup() as clients:
            for _ in range(50):
                clients.create_task(client(barrier))
        await listener.stop()

    asyncio.run(main())


def test_where_all_places_are_taken_a_connection_ends_with_its_answer() -> None:
    """Whoever sends one request after the other would keep the others out for as long as it likes."""

    async def main() -> None:
        listener, port = await _listening(Bounds(connections=1))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(100 * ASK)
        async with asyncio.timeout(20):
            assert (await reader.read()).count(b"200 OK") == 1
        writer.close()
        await listener.stop()

    asyncio.run(main())


def test_small_events_do_not_wait_for_each_other() -> None:
    """asyncio switches Nagle's algorithm off only for sockets that name their protocol."""
    delays = []

    async def app(scope: Any, _receive: object, send: Any) -> None:
        connection = scope["state"]["abort"].__self__.get_extra_info("socket")
        delays.append(not connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def main() -> None:
        listener = Listener(app)
        port = await listener.start("127.0.0.1", 0, "--http-port")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
        assert b"200 OK" in await reader.readline()
        writer.close()
        await listener.stop()

    asyncio.run(main())
    assert delays == [False]


@needs_openssl
def test_handshakes_that_never_end_are_bounded_as_connections_are(tmp_path: Path) -> None:
    """Each holds one of the descriptors that `/metrics` and gRPC need as well."""
    make_certificates(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(tmp_path / "leaf.pem", tmp_path / "leaf.key")
    known = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    asyncio.run(longest_waiting_go(5, tls, known))  # a handshake's own limit is 10 s
