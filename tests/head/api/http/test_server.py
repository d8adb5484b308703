"""Keys, time limits, hanging up, draining and bounds of the HTTP server; the paths that do not generate."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ppserve.config import ServerSettings
from ppserve.core.request import FinishReason
from ppserve.errors import ConfigError
from ppserve.head.api.desk import FrontDesk
from ppserve.head.api.http import exchange
from ppserve.head.api.http.failures import HttpError, status_of
from ppserve.head.api.http.server import HttpServer
from ppserve.head.api.tls import read_certificates
from ppserve.head.engine.output import TokenOutput
from ppserve.head.listener import Bounds, Listener
from tests.certificates import make_certificates, needs_openssl
from tests.fake_engine import CARD, EOS, ByteCodec, FakeEngine, desk_of
from tests.head.api.grpc.test_server import KEYS
from tests.head.api.http.asking import Counted, Served, served_http
from tests.head.api.test_desk import PARENT


def run(scenario: Callable[[Served], Awaitable[None]], **engine: Any) -> None:
    async def main() -> None:
        async with served_http(FakeEngine(**engine)) as served:
            await scenario(served)

    asyncio.run(main())


def raw(path: str, body: object, *headers: str) -> bytes:
    """A request as bytes."""
    content = json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "host: here", f"content-length: {len(content)}", *headers]
    return "\r\n".join([*head, "", ""]).encode() + content


# ---- describing ---------------------------------------------------------------------------------------


def test_what_is_served() -> None:
    async def scenario(served: Served) -> None:
        (model,) = (await served.ask("/v1/models")).json["data"]
        assert model.pop("created") > 0
        assert model == {"id": "fake", "object": "model", "owned_by": "ppserve", "max_model_len": 64}
        assert (await served.ask("/v1/models/fake")).json["id"] == "fake"
        assert (await served.ask("/v1/models/other")).status == 404
        assert (await served.ask("/version")).json == {"version": "0", "system_fingerprint": CARD.fingerprint}
        assert (await served.ask("/tokenizer_info")).json["eos_token"] == "<eos>"

    run(scenario)


def test_text_to_tokens_and_back() -> None:
    async def scenario(served: Served) -> None:
        answer = (await served.ask("/tokenize", {"prompt": "hi<eos>j", "return_token_strs": True})).json
        assert (answer["tokens"], answer["token_strs"]) == ([104, 105, EOS, 106], ["h", "i", "<eos>", "j"])
        assert (answer["count"], answer["max_model_len"]) == (4, 64)
        assert (await served.ask("/detokenize", {"tokens": answer["tokens"]})).json == {"prompt": "hi<eos>j"}
        assert (await served.refusal("/tokenize"))[:2] == (400, "body")
        assert (await served.refusal("/tokenize", prompt="a", model="b"))[:2] == (404, "model")
        assert (await served.refusal("/detokenize", tokens=[999]))[:2] == (400, "tokens[0]")

    run(scenario)


def test_paths_and_methods_that_there_are_not() -> None:
    async def scenario(served: Served) -> None:
        missing = await served.ask("/v1/embeddings", {})
        assert (missing.status, missing.json["error"]["code"]) == (404, "not_found")
        slash = await served.ask("/v1/completions/", {"prompt": "a"})
        assert slash.status == 404, "nobody is sent to an address made of the caller's own Host"
        wrong = await served.ask("/v1/completions")
        assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
        assert wrong.json["error"]["code"] == "method_not_allowed"
        assert served.counted.answers == {("other", 404): 2, ("/v1/completions", 405): 1}
        assert all(answer.headers["x-request-id"].startswith("req-") for answer in (missing, slash, wrong))
        named = await served.ask("/nothing", x_request_id="mine", traceparent=PARENT)
        assert (named.headers["x-request-id"], named.headers["traceparent"]) == ("mine", PARENT)

    run(scenario)


def test_health_follows_the_pipeline() -> None:
    async def scenario(served: Served) -> None:
        assert (await served.ask("/health")).status == 200
        await served.server.set_serving(False)
        assert (await served.ask("/health")).status == 503

    run(scenario)


# ---- who asks -----------------------------------------------------------------------------------------


def test_every_path_but_health_wants_a_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEYS)

    async def main() -> None:
        async with served_http(api_key_file=keys) as served:
            assert (await served.ask("/health")).status == 200
            for wrong in ({}, {"authorization": "Bearer "}, {"authorization": "Bearer wrong"}):
                for path in ("/v1/models", "/version", "/nothing"):
                    answer = await served.ask(path, **wrong)
                    assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
                assert (await served.ask("/v1/completions", {"prompt": "a"}, **wrong)).status == 401
            assert served.engine.requests == []
            for key in ("0123456789abcdef", "fedcba9876543210"):
                answer = await served.ask("/v1/completions", {"prompt": "a"}, authorization=f"Bearer {key}")
                assert answer.status == 200
            callers = {request.caller for request in served.engine.requests}
            assert len(callers) == 2
            assert all(caller.startswith("key:") and "0123456789abcdef" not in caller for caller in callers)

    asyncio.run(main())


def test_inventing_keys_does_not_make_many_callers() -> None:
    async def scenario(served: Served) -> None:
        for key in ("one", "two"):
            await served.ask("/v1/completions", {"prompt": "a"}, authorization=f"Bearer {key}")
        assert [request.caller for request in served.engine.requests] == ["127.0.0.1"] * 2

    run(scenario)


def test_names_come_back() -> None:
    async def scenario(served: Served) -> None:
        answer = await served.ask("/v1/completions", {"prompt": "a"}, x_request_id="mine", traceparent=PARENT)
        assert (answer.headers["x-request-id"], answer.headers["traceparent"]) == ("mine", PARENT)
        assert answer.json["id"] == "cmpl-mine"
        for name, expected in ((" mine, ", "mine,"), ("mine\t", "mine")):
            spaced = await served.ask("/v1/completions", {"prompt": "a", "request_id": name})
            assert (spaced.status, spaced.headers["x-request-id"]) == (200, expected)
        for name in ("  ", "two\nlines", "naïve"):
            unfit = await served.ask("/v1/completions", {"prompt": "a", "request_id": name})
            assert unfit.headers["x-request-id"].startswith("req-")
        other = await served.ask("/version", x_request_id="x" * 200, traceparent="nonsense")
        assert other.headers["x-request-id"].startswith("req-")
        assert "traceparent" not in other.headers

    run(scenario)


@needs_openssl
def test_tls_and_mutual_tls(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    one_way = {"tls_cert": tmp_path / "leaf.pem", "tls_key": tmp_path / "leaf.key"}
    mutual = {**one_way, "tls_client_ca": tmp_path / "ca.pem"}
    anonymous, known = (ssl.create_default_context(cafile=str(tmp_path / "ca.pem")) for _ in "ab")
    known.load_cert_chain(tmp_path / "leaf.pem", tmp_path / "leaf.key")
    request = raw("/v1/completions", {"prompt": "a"}, "connection: close")

    async def ask(served: Served, context: ssl.SSLContext | None) -> bytes:
        with suppress(ssl.SSLError, ConnectionError):  # a handshake that fails shows itself here or there
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port, ssl=context)
            writer.write(request)
            answer = await reader.read()
            writer.close()
            return answer
        return b""

    async def main() -> None:
        async with served_http(**one_way) as served:
            assert b"200 OK" in await ask(served, anonymous)
            assert await ask(served, None) == b""
        async with served_http(**mutual) as served:
            assert b"200 OK" in await ask(served, known)
            assert served.engine.requests[0].caller.startswith("certificate:")
            assert await ask(served, anonymous) == b""
            assert len(served.engine.requests) == 1

            stays = await asyncio.open_connection("127.0.0.1", served.port, ssl=known)
            (tmp_path / "new").mkdir()
            make_certificates(tmp_path / "new")
            of_new = [tmp_path / "new" / name for name in ("leaf.pem", "leaf.key", "ca.pem")]
            certificates = read_certificates(ServerSettings(**dict(zip(mutual, of_new, strict=True))))
            assert certificates is not None
            served.server.show(certificates)
            newly_known = ssl.create_default_context(cafile=str(of_new[2]))
            newly_known.load_cert_chain(*of_new[:2])
            assert b"200 OK" in await ask(served, newly_known)
            assert await ask(served, known) == b""
            stays[1].write(request)
            assert b"200 OK" in await stays[0].read()
            stays[1].close()

    asyncio.run(main())


# ---- until when ---------------------------------------------------------------------------------------


def test_the_caller_s_time_limit() -> None:
    async def scenario(served: Served) -> None:
        answer = await served.ask("/v1/completions", {"prompt": "a"}, x_request_timeout="0.3")
        assert (answer.status, answer.headers["x-should-retry"]) == (504, "false")
        (request,) = served.engine.requests
        assert request.deadline_s is not None
        assert served.engine.cancelled == {request.id: FinishReason.DEADLINE}
        stream = await served.ask("/v1/completions", {"prompt": "a", "stream": True}, x_request_timeout="0.3")
        assert (stream.status, stream.json["error"]["code"]) == (504, "deadline_exceeded")
        for wrong in ("soon", "-1", "0", "nan", "1e9"):
            answer = await served.ask("/v1/completions", {"prompt": "a"}, x_request_timeout=wrong)
            assert (answer.status, answer.json["error"]["param"]) == (400, "x-request-timeout")

    run(scenario, by_hand=True)


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
@pytest.mark.parametrize("stream", [True, False])
def test_hanging_up_reaches_the_engine(stream: bool, prompt: object) -> None:
    async def scenario(served: Served) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(raw("/v1/completions", {"prompt": prompt, "stream": stream}))
        await served.engine.until(lambda engine: len(engine.sinks) == len(prompt))
        writer.close()
        await served.engine.until(lambda engine: len(engine.cancelled) == len(prompt))
        assert set(served.engine.cancelled.values()) == {FinishReason.CANCELLED}

    run(scenario, by_hand=True)


def test_a_finished_answer_is_not_cancelled() -> None:
    async def scenario(served: Served) -> None:
        await served.complete(prompt="a")
        assert served.engine.cancelled == {}

    run(scenario)


def test_a_reader_that_stalls_is_cut_off() -> None:
    async def main() -> None:
        engine = FakeEngine(by_hand=True)
        desk = FrontDesk(engine, ByteCodec(), stall_timeout_s=0.1)
        server = HttpServer(ServerSettings(http_port=0), desk, Counted())
        port = await server.start()
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        writer.write(raw("/v1/completions", {"prompt": "a", "stream": True}))
        await engine.until(lambda engine: bool(engine.sinks))
        (sink,) = engine.sinks.values()
        async with asyncio.timeout(20):
            offset = 0
            while not engine.cancelled:  # until all buffers between here and there are full
                sink.push([TokenOutput(0, offset, 65, "A" * 100_000)])
                offset += 1
                await asyncio.sleep(0)
        writer.close()
        await server.stop(0)

    asyncio.run(main())


def test_draining_lets_answers_finish_and_refuses_new_ones() -> None:
    async def scenario(served: Served) -> None:
        running = asyncio.create_task(served.stream(prompt="a"))
        await served.engine.until(lambda engine: bool(engine.sinks))
        # A second caller, who keeps his connection: new ones are not accepted any more in the end.
        async with asyncio.TaskGroup() as group:
            stopping = group.create_task(served.server.stop(20))
            await asyncio.sleep(0)
            answer = await served.ask("/v1/completions", {"prompt": "b"})
            assert (answer.status, answer.json["error"]["code"]) == (503, "draining")
            assert (await served.ask("/health")).status == 503
            assert not stopping.done()
            next(iter(served.engine.sinks.values())).push([TokenOutput(0, 0, 65, "A", finish=FinishReason.EOS)])
            assert [event["choices"][0]["text"] for event in await running] == ["A"]

    run(scenario, by_hand=True)


def test_the_shutdown_timeout_ends_answers_after_what_they_have() -> None:
    async def scenario(served: Served) -> None:
        running = asyncio.create_task(served.stream(prompt="a"))
        await served.engine.until(lambda engine: bool(engine.sinks))
        next(iter(served.engine.sinks.values())).push([TokenOutput(0, 0, 65, "A")])
        await served.server.stop(0.05)
        first, last = await running
        assert first["choices"][0]["text"] == "A"
        assert last["error"]["code"] == "draining"

    run(scenario, by_hand=True)


# ---- bounds -------------------------------------------------------------------------------------------


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


async def _listening(bounds: Bounds) -> tuple[Listener, int]:
    async def app(_scope: object, _receive: object, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    listener = Listener(app, bounds)
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


def test_when_there_are_too_many_the_one_that_has_waited_longest_goes() -> None:
    async def main() -> None:
        listener, port = await _listening(Bounds(connections=10))
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(50)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
        assert b"200 OK" in await reader.readline()
        async with asyncio.timeout(20):
            for old, _ in idle[:41]:
                await until_closed(old)
        assert not any(young.at_eof() for young, _ in idle[41:])
        for _, each in (*idle, (reader, writer)):
            each.close()
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


def test_an_address_that_cannot_be_bound() -> None:
    async def main() -> None:
        async with served_http() as served:
            for settings, flag, problem in (
                (ServerSettings(http_port=served.port), "--http-port", "address already in use"),
                (ServerSettings(host="192.0.2.1", http_port=0), "--host", "cannot assign"),
            ):
                second = HttpServer(settings, desk_of(FakeEngine()), Counted())
                with pytest.raises(ConfigError, match=problem) as refusal:
                    await second.start()
                assert refusal.value.name == flag
                await second.stop(0)

    asyncio.run(main())
