"""Connections: which give way, which are told that there are too many, and those whose client ended its side."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
from typing import Any

import pytest

from ppserve.core.request import FinishReason
from ppserve.head.engine.streams import TokenOutput
from tests.certificates import make_certificates, needs_openssl
from tests.fake_engine import FakeEngine
from tests.head.api.http.asking import Answer, Served, raw, served_http

COMPLETIONS = "/v1/completions"
VERSION = b"GET /version HTTP/1.1\r\nhost: here\r\n\r\n"

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(served: Served, sent: bytes = b"") -> Connection:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(sent)
    return reader, writer


async def answer_from(reader: asyncio.StreamReader) -> Answer:
    """One answer with a length."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    headers = dict(re.findall(r"^([^:\r]+): ([^\r]*)", head.lower(), re.MULTILINE))
    return Answer(int(head.split()[1]), headers, await reader.readexactly(int(headers["content-length"])))


async def busy(served: Served, number: int) -> Connection:
    """A connection whose request, the `number`-th, waits for its answer."""
    served.engine.by_hand = True
    connection = await connect(served, raw(COMPLETIONS, {"prompt": "a", "stream": bool(number % 2)}))
    await served.engine.until(lambda engine: len(engine.sinks) == number)
    return connection


def end(engine: FakeEngine, text: str = "A") -> None:
    """Every open request ends with one token."""
    while engine.sinks:
        _, sink = engine.sinks.popitem()
        sink([TokenOutput(0, 0, 65, text, finish=FinishReason.EOS)])


async def test_one_connection_too_many_is_told_so_and_counted() -> None:
    async with served_http(max_connections=2) as served:
        opened = [await busy(served, number) for number in (1, 2)]
        for path, refused in ((COMPLETIONS, 1), ("/version", 1), ("/nothing", 1)):
            reader, writer = await connect(served, raw(path, {"prompt": "a"}))
            answer = await answer_from(reader)
            assert (answer.status, answer.json["error"]["code"]) == (503, "too_many_connections")
            assert (answer.headers["retry-after"], answer.headers["connection"]) == ("1", "close")
            assert answer.headers["x-request-id"].startswith("req-")
            assert await reader.read() == b""
            writer.close()
            assert len(served.engine.refused) == refused, "of calls that generate"
        assert served.counted == {(COMPLETIONS, 503): 1, ("/version", 503): 1, ("other", 503): 1}
        end(served.engine)
        assert (await answer_from(opened[1][0])).status == 200
        assert (await served.ask("/version")).status == 200, "there is room again"
        for _, writer in opened:
            writer.close()


async def test_the_longest_idle_connection_gives_way() -> None:
    async with served_http(max_connections=3) as served:
        silent = await connect(served)
        first, second = [await connect(served, VERSION) for _ in "ab"]
        for reader, _ in (first, second):
            assert (await answer_from(reader)).status == 200
        for _ in range(2):
            first[1].write(VERSION)
            assert (await answer_from(first[0])).status == 200, "it was idle for a shorter time than the others"
        opened = [await connect(served, VERSION) for _ in "ab"]
        for reader, _ in opened:
            assert (await answer_from(reader)).status == 200
        assert [await silent[0].read(), await second[0].read()] == [b"", b""]
        first[1].write(VERSION)
        assert (await answer_from(first[0])).status == 200
        for _, writer in (silent, first, second, *opened):
            writer.close()
        assert set(served.counted) == {("/version", 200)}


async def test_a_connection_with_an_unread_answer_is_kept_and_counted() -> None:
    """Closing it would wait for the client, and it would be open beside as many others as there may be."""
    text = "A" * (8 << 20)  # more than hosts hold of what nobody reads
    async with served_http(max_connections=2) as served:
        served.engine.by_hand = True
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", served.port))
        reader, writer = await asyncio.open_connection(sock=sock)
        writer.write(raw(COMPLETIONS, {"prompt": "a"}))
        await served.engine.until(lambda engine: bool(engine.sinks))
        end(served.engine, text)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        # The rest waits for this client, which reads no further for now.
        idle = await connect(served, VERSION)
        assert (await answer_from(idle[0])).status == 200
        newer = await connect(served, VERSION)
        assert (await answer_from(newer[0])).status == 200
        assert await idle[0].read() == b"", "the one that was idle for a shorter time gives way"
        newer[1].write(VERSION[:-2])  # it is idle no more
        assert (await served.ask("/version")).status == 503, "nothing else can give way"
        newer[1].write(VERSION[-2:])
        assert (await answer_from(newer[0])).status == 200
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        length = re.search(r"content-length: (\d+)", head)
        assert length is not None
        assert text.encode() in await reader.readexactly(int(length[1]))
        assert (await served.ask("/version")).status == 200
        assert await reader.read() == b"", "once it is read, it is the longest idle one"
        for _, each in ((reader, writer), idle, newer):
            each.close()


async def test_a_request_that_has_begun_gives_way_to_nobody() -> None:
    async with served_http(max_connections=1) as served:
        reader, writer = await connect(served, VERSION[:-2])
        others = [await connect(served) for _ in "abc"]
        writer.write(VERSION[-2:])
        assert (await answer_from(reader)).status == 200
        for _, other in ((reader, writer), *others):
            other.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_a_client_that_ended_its_side_gets_its_answer(served: Served, stream: bool, version: str) -> None:
    served.engine.by_hand = True
    request = raw(COMPLETIONS, {"prompt": "a", "stream": stream}).replace(b"HTTP/1.1", f"HTTP/{version}".encode())
    reader, writer = await connect(served, request)
    await served.engine.until(lambda engine: bool(engine.sinks))
    writer.write_eof()
    await served.ask("/version")  # the end arrived before this was answered
    assert served.engine.cancelled == set()
    end(served.engine, "an answer")
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"an answer" in answer
    assert (b"data: [DONE]" in answer) == stream
    writer.close()
    assert served.counted[COMPLETIONS, 200] == 1


async def test_requests_that_came_together_are_all_answered(served: Served) -> None:
    reader, writer = await connect(served, raw(COMPLETIONS, {"prompt": "a"}) * 3 + raw(COMPLETIONS, {})[:-1])
    writer.write_eof()
    answers = await reader.read()
    assert answers.count(b"HTTP/1.1 200 OK") == 3
    assert answers.count(b"HTTP/1.1 ") == 3, "the fourth is not complete"
    writer.close()


async def test_a_request_that_will_not_be_complete_is_not_answered(served: Served) -> None:
    reader, writer = await connect(served, raw(COMPLETIONS, {"prompt": "a"})[:-1])
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()
    assert served.engine.requests == []


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_clients_that_have_gone_end_their_requests(served: Served, version: str) -> None:
    """What a client that closed its connection looks like at first is one that ended its side. The last one has
    done only that, and stays."""
    if version == "1.0" and sys.platform != "linux":
        pytest.skip("only Linux lets a test say how soon a host forgets a closed connection")
    served.engine.by_hand = True
    prompts: list[Any] = ["a", ["a", "b"]]
    bodies = [{"prompt": prompt, "stream": stream} for prompt in prompts for stream in (True, False)]
    requests = [raw(COMPLETIONS, body) for body in (*bodies, {"prompt": "stays"})]
    opened = [await connect(served, each.replace(b"HTTP/1.1", f"HTTP/{version}".encode())) for each in requests]
    await served.engine.until(lambda engine: len(engine.sinks) == 7)
    (stays,) = (request for request in served.engine.requests if bytes(request.prompt_ids) == b"stays")
    for _, writer in opened[:-1]:
        if version == "1.0":  # not after a minute, but a second
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_LINGER2, 1)
        writer.close()
    reader, writer = opened[-1]
    writer.write_eof()
    await served.engine.until(lambda engine: len(engine.cancelled) == 6)
    assert stays.id not in served.engine.cancelled
    end(served.engine)
    *interim, answer = re.split(rb"(?=HTTP/1\.1 )", await reader.read())[1:]
    assert set(interim) <= {b"HTTP/1.1 100 Continue\r\n\r\n"}
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == "A"
    writer.close()


async def test_a_stream_s_client_that_has_gone_is_noticed_by_what_is_sent(served: Served) -> None:
    served.engine.by_hand = True
    reader, writer = await connect(served, raw(COMPLETIONS, {"prompt": "a", "stream": True}))
    await served.engine.until(lambda engine: bool(engine.sinks))
    ((request_id, sink),) = served.engine.sinks.items()
    sink([TokenOutput(0, 0, 65, "A")])
    await reader.readuntil(b"data: ")
    writer.close()
    for offset in range(1, 1000):
        sink([TokenOutput(0, offset, 65, "A")])
        await asyncio.sleep(0)
        if request_id in served.engine.cancelled:
            break
    await served.engine.until(lambda engine: request_id in engine.cancelled)


@needs_openssl
async def test_with_tls_the_end_of_a_client_s_side_ends_the_connection(tmp_path: Any) -> None:
    import ssl

    make_certificates(tmp_path)
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    async with served_http(tls_cert=tmp_path / "leaf.pem", tls_key=tmp_path / "leaf.key") as served:
        served.engine.by_hand = True
        _, writer = await asyncio.open_connection("127.0.0.1", served.port, ssl=context)
        writer.write(raw(COMPLETIONS, {"prompt": "a"}))
        await served.engine.until(lambda engine: bool(engine.sinks))
        writer.close()
        await served.engine.until(lambda engine: bool(engine.cancelled))
