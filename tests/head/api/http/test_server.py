"""The HTTP server: the paths that do not generate, keys, names, TLS, its bounds."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from openai import AsyncOpenAI
from starlette.types import Receive, Scope, Send

from ppserve.head.api.http.responses import HttpError
from ppserve.head.listener import Listener
from tests.certificates import make_certificates, needs_openssl
from tests.fake_engine import CARD, EOS, KEYS, FakeEngine
from tests.head.api.http.asking import Served, raw, served_http
from tests.head.api.test_request_handler import PARENT


async def test_what_is_served(served: Served) -> None:
    (model,) = (await served.ask("/v1/models")).json["data"]
    assert model.pop("created") > 0
    assert model == {
        "id": "fake",
        "object": "model",
        "owned_by": "ppserve",
        "max_model_len": 64,
        "root": "fake",
        "parent": None,
    }
    assert (await served.ask("/v1/models/fake")).json["id"] == "fake"
    assert (await served.ask("/v1/models/other")).status == 404
    assert (await served.ask("/version")).json == {"version": "0", "system_fingerprint": CARD.fingerprint}
    assert (await served.ask("/tokenizer_info")).json["eos_token"] == "<eos>"


async def test_a_model_is_served_under_each_of_its_names() -> None:
    """A hub's id has a slash, which some clients escape in a path; answers carry the first name, as vLLM's do."""
    card = replace(CARD, name="org/model-7B", aliases=("gpt-4",), root="org/model-7B", path="/models/org/model-7B")
    async with served_http(FakeEngine(description=card)) as served:
        listed = (await served.ask("/v1/models")).json["data"]
        assert [(model["id"], model["root"]) for model in listed] == [
            ("org/model-7B", "org/model-7B"),
            ("gpt-4", "org/model-7B"),
        ]
        for escaped, name in {
            "org/model-7B": "org/model-7B",
            "org%2Fmodel-7B": "org/model-7B",
            "gpt-4": "gpt-4",
            "/models/org/model-7B": "/models/org/model-7B",
        }.items():
            assert (await served.ask(f"/v1/models/{escaped}")).json["id"] == name
            assert (await served.complete(model=name, prompt="a"))["model"] == "org/model-7B"
            (event, *_) = await served.stream(model=name, prompt="a")
            assert event["model"] == "org/model-7B"
        for other in ("model-7B", "org", "org/model-7B/"):
            assert (await served.ask(f"/v1/models/{other}")).status == 404
            status, param, message = await served.refusal(model=other, prompt="a")
            assert (status, param, message) == (
                404,
                "model",
                "this model is not served; 'org/model-7B' and 'gpt-4' are",
            )
        async with AsyncOpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none") as client:
            assert (await client.models.retrieve("org/model-7B")).id == "org/model-7B"
            assert [model.id async for model in client.models.list()] == ["org/model-7B", "gpt-4"]


async def test_text_to_tokens_and_back() -> None:
    async with served_http() as served:
        served.handler.tokenizer.special_ids = {"<e": 1, "<eos>": EOS}  # the longest one is meant
        answer = (await served.ask("/tokenize", {"prompt": "hi<eos>j", "return_token_strs": True})).json
        assert (answer["tokens"], answer["token_strs"]) == ([104, 105, EOS, 106], ["h", "i", "<eos>", "j"])
        assert (answer["count"], answer["max_model_len"]) == (4, 64)
        assert (await served.ask("/detokenize", {"tokens": answer["tokens"]})).json == {"prompt": "hi<eos>j"}
        assert (await served.refusal("/tokenize"))[:2] == (400, "prompt")
        assert (await served.refusal("/tokenize", prompt="a", model="b"))[:2] == (404, "model")
        assert (await served.refusal("/detokenize", tokens=[999]))[:2] == (400, "tokens[0]")


async def test_paths_and_methods_that_there_are_not(served: Served) -> None:
    missing = await served.ask("/v1/embeddings", {})
    assert (missing.status, missing.json["error"]["code"]) == (404, "not_found")
    slash = await served.ask("/v1/completions/", {"prompt": "a"})
    assert slash.status == 404, "nobody is sent to an address made of the caller's own Host"
    wrong = await served.ask("/v1/completions")
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json["error"]["code"] == "method_not_allowed"
    assert served.counted == {("other", 404): 2, ("/v1/completions", 405): 1}
    assert all(answer.headers["x-request-id"].startswith("req-") for answer in (missing, slash, wrong))
    named = await served.ask("/nothing", x_request_id="mine", traceparent=PARENT)
    assert (named.headers["x-request-id"], named.headers["traceparent"]) == ("mine", PARENT)


# ---- who asks -----------------------------------------------------------------------------------------


async def test_every_path_but_health_wants_a_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEYS)
    async with served_http(api_key_file=keys) as served:
        assert (await served.ask("/health")).status == 200
        for wrong in ({}, {"authorization": "Bearer "}, {"authorization": "Bearer wrong"}):
            for path in ("/v1/models", "/version", "/nothing"):
                answer = await served.ask(path, **wrong)
                assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert (await served.ask("/v1/completions", {"prompt": "a"}, **wrong)).status == 401
        assert served.engine.requests == []
        assert len(served.engine.refused) == 3, "of calls that generate"
        for key in ("0123456789abcdef", "fedcba9876543210"):
            answer = await served.ask("/v1/completions", {"prompt": "a"}, authorization=f"Bearer {key}")
            assert answer.status == 200
        callers = {request.caller for request in served.engine.requests}
        assert len(callers) == 2
        assert all(caller.startswith("key:") and "0123456789abcdef" not in caller for caller in callers)


async def test_names_come_back(served: Served) -> None:
    answer = await served.ask("/v1/completions", {"prompt": "a"}, x_request_id="mine", traceparent=PARENT)
    assert (answer.headers["x-request-id"], answer.headers["traceparent"]) == ("mine", PARENT)
    assert answer.json["id"] == "cmpl-mine"
    for name, expected in ((" mine, ", "mine,"), ("mine\t", "mine")):
        spaced = await served.ask("/v1/completions", {"prompt": "a", "request_id": name})
        assert (spaced.status, spaced.headers["x-request-id"]) == (200, expected)
    blank = await served.ask("/v1/completions", {"prompt": "a", "request_id": "  "})
    assert blank.headers["x-request-id"].startswith("req-")
    for wrong in ("x" * 129, "na\xefve", "tab\there"):
        unfit = await served.ask("/version", x_request_id=wrong)
        assert (unfit.status, unfit.json["error"]["param"]) == (400, "x-request-id")
        assert unfit.headers["x-request-id"].startswith("req-")


@needs_openssl
async def test_tls_and_mutual_tls(tmp_path: Path) -> None:
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

    async with served_http(**one_way) as served:
        assert b"200 OK" in await ask(served, anonymous)
        assert await ask(served, None) == b""
    async with served_http(**mutual) as served:
        assert b"200 OK" in await ask(served, known)
        assert served.engine.requests[0].caller.startswith("certificate:")
        assert await ask(served, anonymous) == b""
        assert len(served.engine.requests) == 1


ASK = b"GET / HTTP/1.1\r\nhost: here\r\n\r\n"


async def test_bodies_have_a_limit(served: Served) -> None:
    huge = {"prompt": "x" * CARD.limits.max_body_bytes}
    assert (await served.refusal(**huge))[0] == 413
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n")
    piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    for _ in range(CARD.limits.max_body_bytes // 0x10000 + 2):
        writer.write(piece)
    assert b" 413 " in await reader.readline()
    writer.close()
    assert (await served.ask("/health")).status == 200
    assert served.engine.refused[0].http_status == 413
    assert isinstance(served.engine.refused[0], HttpError)
    assert served.engine.refused[0].status == "INVALID_ARGUMENT", "a mistake of the caller, in metrics as well"


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
async def test_bytes_that_are_no_request_are_the_caller_s_mistake(
    served: Served, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(sent)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 4")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    writer.close()
    assert {status for _, status in served.counted} <= {400, 499}
    assert served.counted["other", 400] == 1
    assert (await served.ask("/health")).status == 200
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_small_events_do_not_wait_for_each_other() -> None:
    """asyncio switches Nagle's algorithm off only for sockets that name their protocol."""
    asked: list[socket.socket] = []

    async def app(scope: Scope, _receive: Receive, send: Send) -> None:
        asked.append(scope["state"]["transport"].get_extra_info("socket"))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    listener = Listener(app, "--http-port", max_connections=3)
    reader, writer = await asyncio.open_connection("127.0.0.1", await listener.start("127.0.0.1", 0))
    writer.write(ASK)
    assert b"200" in await reader.readline()
    assert asked[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    writer.close()
    await listener.stop()
