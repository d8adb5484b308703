"""A call's life without any protocol: what reaches the engine, what comes back, and who is told of an end."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ppserve.errors import ConfigError, Draining, InvalidRequest, Overloaded, RequestError, Unauthenticated
from ppserve.head.api import call
from ppserve.head.api.auth import ApiKeys, caller_name, key_of
from ppserve.head.api.call import INTERNAL_TEXT, Call
from ppserve.head.api.chat_template import ChatTemplate
from ppserve.head.api.http.chat import ChatAnswers, ChatBody
from ppserve.head.api.http.generating import generate, unless_hung_up
from ppserve.head.api.request_handler import LONG_TEXT, RequestHandler
from ppserve.head.api.stream import deltas_of
from ppserve.head.engine import loop
from ppserve.head.options import GenerationOptions
from tests.fake_engine import CARD, EOS, ByteCodec, FakeEngine, drawn_token

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def a_call(caller: str = "somebody", timeout_s: float | None = None, traceparent: str | None = None) -> Call:
    return Call.begin({"traceparent": traceparent or ""}, b"", caller, has_keys=False).within(timeout_s)


async def text_of(
    request_handler: RequestHandler, prompt: str | list[int] = "", call: Call | None = None, **given: Any
) -> str:
    async with request_handler.generate(GenerationOptions(**given), prompt, call or a_call()) as stream:
        return "".join([delta.text async for _, delta in deltas_of([stream])])


async def test_text_and_ids_ask_for_the_same(engine: FakeEngine, request_handler: RequestHandler) -> None:
    for prompt in ("hello", [*b"hello"]):
        said = await text_of(request_handler, prompt=prompt, max_tokens=3, seed=5, echo=True)
        drawn = [drawn_token(engine.requests[-1], 0, offset) for offset in range(3)]
        assert said == "hello" + ByteCodec().decode(drawn)
    assert engine.requests[0].prompt_ids == engine.requests[1].prompt_ids == tuple(b"hello")
    assert len({request.id for request in engine.requests}) == 2
    assert engine.cancelled == set()


async def test_leaving_early_ends_the_request_and_is_logged_as_that(
    engine: FakeEngine, request_handler: RequestHandler, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    engine.by_hand = True
    async with request_handler.generate(GenerationOptions(), "", a_call()):
        assert request_handler.num_open_streams == 1
    assert engine.cancelled == {engine.requests[0].id}
    assert ["answered" in caplog.text, "cancelled" in caplog.text] == [False, True]
    assert request_handler.num_open_streams == 0


async def test_long_texts_are_tokenized_and_back(request_handler: RequestHandler) -> None:
    for text in ("", "é", "x" * (LONG_TEXT + 1)):
        ids = await request_handler.tokenize("prompt", text)
        assert ids == list(text.encode())
        assert await request_handler.detokenize("tokens", ids) == (text, text.encode())
    with pytest.raises(InvalidRequest, match=r"^tokens\[0\]: "):
        await request_handler.detokenize("tokens", [5000])
    parts = "a", "<eos>", "", "<eos>", "b<eos>"
    assert await request_handler.tokenize("prompt", *parts) == [*b"a", EOS, EOS, *b"b<eos>"]
    with pytest.raises(InvalidRequest, match="the limit is"):
        await request_handler.tokenize(
            "prompt", *["x" * LONG_TEXT] * (CARD.limits.max_prompt_bytes // LONG_TEXT + 1)
        )


class WithNewToken(ByteCodec):
    """`<tool>` was added to the vocabulary, and the model got no row for it."""

    def encode_parts(self, parts: Sequence[str], surrounds: bool = False) -> list[int]:
        before, mark, after = "".join(parts).partition("<tool>")
        return [*before.encode(), *([300] if mark else ()), *after.encode()]

    def token_bytes(self, token_id: int) -> bytes:
        return b"<tool>" if token_id == 300 else super().token_bytes(token_id)


async def test_a_token_for_which_the_model_has_no_row_is_refused_where_it_is_used() -> None:
    handler = RequestHandler(FakeEngine(), CARD, WithNewToken())
    assert await handler.tokenize("prompt", "a tool") == list(b"a tool")
    with pytest.raises(InvalidRequest) as refused:
        async with handler.generate(GenerationOptions(), "a <tool>", Call("x", 1)):
            pass
    (violation,) = refused.value.violations
    assert violation.field == "prompt"
    problem = "the token '<tool>' has the id 300, but the model has 257 rows: it was never trained"
    assert violation.problem == problem


async def test_many_short_texts_are_tokenized_aside_as_a_long_one_is() -> None:
    threads = set()

    class Codec(ByteCodec):
        def encode_parts(self, parts: Sequence[str], surrounds: bool = False) -> list[int]:
            threads.add(threading.get_ident())
            return super().encode_parts(parts, surrounds)

    await RequestHandler(FakeEngine(), CARD, Codec()).tokenize("prompt", "hello " * 1000)
    assert threads
    assert threading.get_ident() not in threads


async def test_what_ends_a_request_before_it_is_queued_is_counted() -> None:
    counted: list[str] = []
    engine = FakeEngine(refusal=Overloaded("the queue is full", 1.5))
    handler = RequestHandler(
        engine, engine.description, ByteCodec(), None, lambda error: counted.append(error.status)
    )
    with pytest.raises(InvalidRequest):
        await text_of(handler, top_p=7)
    with pytest.raises(Overloaded):
        await text_of(handler, "a")
    for generates in (True, False):
        with pytest.raises(Unauthenticated), handler.counting_refusals(generates):
            raise Unauthenticated
    await handler.drain(0)
    with pytest.raises(Draining):
        await text_of(handler, "a")
    assert counted == ["INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNAUTHENTICATED", "UNAVAILABLE"]


@pytest.mark.parametrize(("timeout_s", "margin_s"), [(60.0, 0.05), (0.5, 0.05), (0.2, 0.02), (0.0, 0.0)])
def test_an_answer_ends_so_long_before_its_callers_deadline_that_its_end_arrives(
    timeout_s: float, margin_s: float
) -> None:
    """The engine looks at deadlines more often than that."""
    before_s = time.monotonic() - 1e-6  # sums are rounded
    deadline_s = a_call(timeout_s=timeout_s).deadline_s
    assert deadline_s is not None
    assert before_s <= deadline_s - (timeout_s - margin_s) <= time.monotonic() + 1e-6
    assert a_call().deadline_s is None
    assert loop._TICK_S < call.DEADLINE_MARGIN_S


async def test_draining_leaves_no_task_behind(request_handler: RequestHandler, engine: FakeEngine) -> None:
    engine.by_hand = True
    before = asyncio.all_tasks()
    async with request_handler.generate(GenerationOptions(), "", a_call()):
        await request_handler.drain(0)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before, "nobody waits for the end of the last stream"


@pytest.mark.parametrize("hangs_up", [False, True])
async def test_an_answer_or_a_caller_that_hangs_up_is_waited_for_no_longer_than_the_other(hangs_up: bool) -> None:
    before, heard = asyncio.all_tasks(), asyncio.Event()
    if hangs_up:
        heard.set()

    async def receive() -> dict[str, str]:
        await heard.wait()
        return {"type": "http.disconnect"}

    async def answer() -> Response:
        if hangs_up:
            await asyncio.Event().wait()
        return Response()

    with pytest.raises(ClientDisconnect) if hangs_up else nullcontext():
        await unless_hung_up(Request({"type": "http"}, receive), answer())
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_a_caller_may_hang_up_while_its_chat_is_rendered(request_handler: RequestHandler) -> None:
    begun, goes_on = asyncio.Event(), asyncio.Event()

    class Slow(ChatTemplate):
        async def render(self, *_chat: object) -> list[str]:
            begun.set()
            await goes_on.wait()
            return []

    chat = json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode()
    said: list[dict[str, Any]] = [{"type": "http.request", "body": chat}]

    async def receive() -> dict[str, Any]:
        if said:
            return said.pop()
        await begun.wait()
        return {"type": "http.disconnect"}

    request_handler.template = Slow("{{ messages }}", {}, {})
    asked = Request({"type": "http", "headers": [], "state": {"call": a_call()}}, receive)
    with pytest.raises(ClientDisconnect):
        async with asyncio.timeout(20):
            await generate(asked, request_handler, ChatBody, ChatAnswers)
    goes_on.set()  # what has begun is not cancelled
    request_handler.close()


def test_only_a_traceparent_is_kept_as_one() -> None:
    assert a_call(traceparent=PARENT).trace["traceparent"] == PARENT
    for wrong in (None, "", PARENT.upper(), PARENT + " and more"):
        assert set(a_call(traceparent=wrong).trace) == {"request_id"}


def test_what_nobody_foresaw_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    call = a_call()
    refused = Overloaded("the queue is full", 1.5)
    with caplog.at_level(logging.INFO):
        call.refusal(refused)
    assert not caplog.records, "under overload it would be most of the log"
    with caplog.at_level(logging.DEBUG):
        assert call.refusal(refused) is refused
        told = call.refusal(ValueError("secret"))
    assert (type(told), str(told)) == (RequestError, INTERNAL_TEXT)
    assert "secret" not in str(told)
    expected, unexpected = caplog.records
    assert expected.getMessage() == f"request {call.request_id}: QUEUE_FULL"
    assert (unexpected.levelname, unexpected.request_id) == ("ERROR", call.request_id)
    assert "secret" in caplog.text


def test_keys_open_the_door_until_they_are_taken_out(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# one\n0123456789abcdef\n")
    keys = ApiKeys(path)
    right = {"authorization": "Bearer 0123456789abcdef"}
    keys.check(right)
    for wrong in ({}, *({"authorization": f"Bearer {key}"} for key in ("", "0123456789abcdeF", "# one"))):
        with pytest.raises(Unauthenticated):
            keys.check(wrong)
    path.write_text("short\n")
    with pytest.raises(ConfigError):
        keys.read()
    keys.check(right)
    path.write_text("fedcba9876543210\n")
    keys.read()
    with pytest.raises(Unauthenticated):
        keys.check(right)


def test_whom_a_call_counts_for() -> None:
    for value in ("Bearer  0123456789abcdef ", "bearer 0123456789abcdef"):
        assert key_of({"authorization": value}) == "0123456789abcdef"
    for value in ("Basic 0123456789abcdef", "0123456789abcdef", ""):
        assert key_of({"authorization": value}) is None
    assert key_of({}) is None
    assert key_of({"x-api-key": "0123456789abcdef"}) == "0123456789abcdef"
    assert key_of({"x-api-key": "another", "authorization": "Bearer 0123456789abcdef"}) == "0123456789abcdef"
    names = [
        caller_name("0123456789abcdef", b"certificate", "host"),
        caller_name(None, b"certificate", "host"),
        caller_name(None, b"", "host"),
    ]
    assert [name.partition(":")[0] for name in names] == ["key", "certificate", "host"]
    assert "0123456789abcdef" not in names[0]
    assert names[0] == caller_name("0123456789abcdef", b"", "elsewhere")
