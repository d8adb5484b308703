"""/v1/messages: what Anthropic's clients send and read. The client itself: `make clients`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from ppserve.core.request import FinishReason
from ppserve.errors import Overloaded, RequestFailed
from ppserve.head.api.http.anthropic_body import MessagesBody
from ppserve.head.api.http.bodies import parse_body
from ppserve.head.engine.streams import TokenOutput
from tests.fake_engine import CARD, EOS, KEYS, ByteCodec, drawn_token
from tests.head.api.http.asking import TEMPLATE, Answer, Served, served_http

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO = [{"role": "user", "content": "hi"}]


async def ask(served: Served, path: str = MESSAGES, /, **body: object) -> Answer:
    answer = await served.ask(path, {"messages": HELLO, "max_tokens": 6, "seed": 3, **body})
    assert answer.status == 200, answer.body
    return answer


async def refusal(served: Served, **body: object) -> tuple[int, str, str]:
    """Status, type and message of an answer that must be an error in Anthropic's form."""
    answer = await served.ask(MESSAGES, {"messages": HELLO, **body})
    assert set(answer.json) == {"type", "error"}
    assert answer.json["type"] == "error"
    return answer.status, answer.json["error"]["type"], answer.json["error"]["message"]


def drawn(served: Served, length: int) -> str:
    """The text that the engine draws for its last request."""
    request = served.engine.requests[-1]
    return ByteCodec().decode([drawn_token(request, 0, offset) for offset in range(length)])


async def test_a_message_whole(served: Served) -> None:
    answer = (await ask(served, temperature=0.5, top_k=3, top_p=0.9, metadata={"user_id": "somebody"})).json
    (request,) = served.engine.requests
    assert list(request.prompt_ids) == [*b"u:hi", EOS, *b"\na:"]
    assert (request.sampling.temperature, request.sampling.top_k, request.stop.max_tokens) == (0.5, 3, 6)
    assert answer.pop("id").startswith("msg_req-")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "system_fingerprint": served.handler.description.fingerprint,
        "seed": 3,
        "content": [{"type": "text", "text": drawn(served, 6)}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(request.prompt_ids) - 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": 6,
        },
    }


async def test_a_message_as_events(served: Served) -> None:
    whole = (await ask(served)).json
    begin, ping, start, *deltas, stop, change, end = (await ask(served, stream=True)).named_events
    assert begin[0] == "message_start"
    message = begin[1]["message"]
    assert message["usage"] == {
        **whole["usage"],
        "input_tokens": 8,
        "cache_read_input_tokens": 0,
        "output_tokens": 0,
    }
    nothing = {"content": [], "stop_reason": None, "stop_sequence": None}
    assert message == {**whole, **nothing, "id": message["id"], "usage": message["usage"]}
    assert ping == ("ping", {"type": "ping"})
    block = {"type": "text", "text": ""}
    assert start[1] == {"type": "content_block_start", "index": 0, "content_block": block}
    told = {(name, event["index"], event["delta"]["type"]) for name, event in deltas}
    assert told == {("content_block_delta", 0, "text_delta")}
    assert len(deltas) > 1
    assert "".join(event["delta"]["text"] for _, event in deltas) == whole["content"][0]["text"]
    assert stop[1] == {"type": "content_block_stop", "index": 0}
    assert change[1]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert change[1]["usage"] == whole["usage"]
    assert end == ("message_stop", {"type": "message_stop"})


@pytest.mark.parametrize(
    ("reason", "matched", "told", "sequence"),
    [
        (FinishReason.EOS, EOS, "end_turn", None),
        (FinishReason.STOP_TOKEN, 65, "end_turn", None),
        (FinishReason.STOP_STRING, "END", "stop_sequence", "END"),
        (FinishReason.CONTEXT_LENGTH, None, "model_context_window_exceeded", None),
        (FinishReason.CANCELLED, None, "abort", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_end_is_told_in_anthropic_s_words(
    served: Served, stream: bool, reason: FinishReason, matched: int | str | None, told: str, sequence: str | None
) -> None:
    """Nothing need be said before it."""
    served.engine.by_hand = True
    asked = asyncio.create_task(ask(served, stream=stream, stop_sequences=["END"]))
    await served.engine.until(lambda engine: bool(engine.requests))
    (request,) = served.engine.requests
    assert request.stop.stop == ("END",)
    served.engine.sinks[request.id]([TokenOutput(0, 0, finish=reason, matched=matched)])
    answer = await asked
    end = {"stop_reason": told, "stop_sequence": sequence}
    if stream:
        assert [name for name, _ in answer.named_events] == [
            "message_start",
            "ping",
            "message_delta",
            "message_stop",
        ]
        assert answer.named_events[2][1]["delta"] == end
    else:
        assert answer.json | end | {"content": []} == answer.json


async def test_an_error_within_a_stream_is_its_last_event(served: Served) -> None:
    served.engine.break_error, served.engine.break_after, served.engine.num_breaks = RequestFailed("no luck"), 2, 1
    events = (await ask(served, stream=True)).named_events
    assert events[-1] == ("error", {"type": "error", "error": {"type": "api_error", "message": "no luck"}})
    assert events[-2][0] == "content_block_delta"


def shown(body: dict[str, Any]) -> list[Any]:
    """The messages that templates are given."""
    parsed = parse_body(json.dumps({"messages": HELLO, **body}).encode(), MessagesBody)
    return [message.shown for message in parsed.prompts[0].messages]


def text(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": each, "cache_control": {"type": "ephemeral"}} for each in texts]


def test_messages_become_those_that_templates_know() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": 5.0}}
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": text("a", "b"), "is_error": False},
        {"type": "tool_result", "tool_use_id": "t2", "content": "c"},
        {"type": "tool_result", "tool_use_id": "t3"},
    ]
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    messages = [
        {"role": "user", "content": "one"},
        {"role": "user", "content": text("two")},
        {"role": "assistant", "content": [thought, *text("three"), use, {**use, "id": "t2"}]},
        {"role": "user", "content": [*results, *text("four")]},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": results[:1]},
    ]
    called = {"type": "function", "function": {"name": "look", "arguments": {"at": 5.0}}}
    parts = [{"type": "text", "text": each} for each in ("a", "b")]
    assert shown({"system": "be kind", "messages": messages}) == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": each} for each in ("one", "two")]},
        {
            "role": "assistant",
            "content": "three",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "t1", **called}, {"id": "t2", **called}],
        },
        {"role": "tool", "content": parts, "tool_call_id": "t1"},
        {"role": "tool", "content": "c", "tool_call_id": "t2"},
        {"role": "tool", "content": "", "tool_call_id": "t3"},
        {"role": "user", "content": "four"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "t1", **called}]},
        {"role": "tool", "content": parts, "tool_call_id": "t1"},
    ]


def test_a_coding_agent_s_line_that_always_differs_is_no_part_of_the_prompt() -> None:
    """If it were one, no prefix of a prompt would ever be found in the cache."""
    line = "x-anthropic-billing-header: cc_version=2.1.36.{}; cc_entrypoint=cli; cch={};"
    alone = shown({"system": text("You are an agent.", "Be brief.")})
    for number in ("1a", "2b"):
        varying = line.format(number, number)
        assert shown({"system": text(varying, "You are an agent.", "Be brief.")}) == alone
        assert shown({"system": varying + "\nYou are an agent."})[0]["content"] == "You are an agent."
        assert shown({"system": text(varying)}) == HELLO
    said = f"Say {line}"
    assert shown({"system": said})[0]["content"] == said


@pytest.mark.parametrize(
    ("thinking", "thinks"),
    [
        (None, False),
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "adaptive"}, True),
        ({"type": "disabled"}, False),
    ],
)
def test_thinking_and_effort_are_variables_of_templates(thinking: object, thinks: bool) -> None:
    body = {"messages": HELLO, "thinking": thinking, "output_config": {"effort": "low"}}
    parsed = parse_body(json.dumps(body).encode(), MessagesBody)
    assert parsed.prompts[0].variables == {
        "enable_thinking": thinks,
        "thinking": thinks,
        "reasoning_effort": "low",
    }


async def test_an_assistant_s_last_message_is_continued(served: Served) -> None:
    await ask(served, messages=[*HELLO, {"role": "assistant", "content": "Once"}])
    assert list(served.engine.requests[-1].prompt_ids) == [*b"u:hi", EOS, *b"\na:Once"]


async def test_an_answer_of_a_given_form(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 5.0}}, "required": ["a"]}
    await ask(served, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert served.engine.filters[-1] is not None
    for given, field in (
        ({"type": "json_schema"}, "output_config.format.schema: missing"),
        ({"type": "yaml"}, "output_config.format.type"),
        ({"type": "json_schema", "schema": {"not": {}}}, "output_config.format.schema"),
    ):
        for body in ({"output_config": {"format": given}}, {"output_format": given}):
            status, _, message = await refusal(served, **body)
            name = field if "output_config" in body else field.replace("config.", "")
            assert (status, message.startswith(name)) == (400, True), message


async def test_a_form_in_vllm_s_words_is_one_too(served: Served) -> None:
    for given in ({"guided_choice": ["a"]}, {"structured_outputs": {"regex": "a"}}):
        await ask(served, **given)
        assert served.engine.filters[-1] is not None
        both = {**given, "output_config": {"format": {"type": "json_object"}}}
        status, _, message = await refusal(served, **both)
        assert (status, message.endswith("not together with output_config.format")) == (400, True), message


async def test_tokens_are_counted_as_a_message_uses_them(served: Served) -> None:
    for body in ({}, {"system": text("a", "b")}, {"messages": [*HELLO, {"role": "assistant", "content": "c"}]}):
        counted = (await ask(served, COUNT, **body)).json
        usage = (await ask(served, **body)).json["usage"]
        assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert len(served.engine.requests) == 3


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "tool", "content": "a"}]}, "messages"),
        *(
            ({"messages": [{"role": "user", "content": [block]}]}, f"messages[0].content[0].{name}")
            for block, name in (
                ({"type": "image", "source": {}}, "type"),
                ({"type": "text"}, "text"),
                ({"type": "tool_use", "id": "a", "name": "b"}, "input"),
                ({"type": "tool_result"}, "tool_use_id"),
                ({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}, "content[0]"),
            )
        ),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"system": 5}, "system"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"stop_sequences": ["a", ""]}, "stop_sequences[1]"),
        ({"stop_sequences": ["x"] * 33}, "stop_sequences"),
        ({"top_p": 7}, "top_p"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"messages": [{"role": "user", "content": "x" * 64}], "max_tokens": 1}, "messages"),
        ({"request_id": "two\nlines"}, "request_id"),
        ({"mcp_servers": [{"url": "a"}]}, "mcp_servers"),
        ({"container": "a"}, "container"),
    ],
)  # fmt: skip
async def test_a_refusal_names_the_field(served: Served, body: dict[str, Any], field: str) -> None:
    status, kind, message = await refusal(served, **body)
    assert (status, kind, message.partition(":")[0]) == (400, "invalid_request_error", field), message
    assert served.engine.requests == []


async def test_errors_have_anthropic_s_types(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEYS)
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    async with served_http(api_key_file=tmp_path / "keys", chat_template=tmp_path / "chat.jinja") as served:
        body, known = {"messages": HELLO, "max_tokens": 1}, {"x_api_key": "0123456789abcdef"}
        told = [
            await served.ask(MESSAGES, body),
            await served.ask(MESSAGES, body, x_api_key="another key"),
            await served.ask(MESSAGES, {**body, "model": "another"}, **known),
            await served.ask(MESSAGES, b" " * (CARD.limits.max_body_bytes + 1), **known),
            await served.ask(MESSAGES, body, "PUT", **known),
            await served.ask(COUNT, {**body, "messages": []}, **known),
        ]
        assert [(answer.status, answer.json["error"]["type"]) for answer in told] == [
            (401, "authentication_error"),
            (401, "authentication_error"),
            (404, "not_found_error"),
            (413, "request_too_large"),
            (405, "invalid_request_error"),
            (400, "invalid_request_error"),
        ]
        assert all(answer.json["type"] == "error" and answer.headers["x-request-id"] for answer in told)
        headers = {"anthropic_version": "2023-06-01", "anthropic_beta": "a,b", **known}
        assert (await served.ask(MESSAGES, body, **headers)).status == 200
        served.engine.refusal = Overloaded("too much", retry_after_s=2)
        full = await served.ask(MESSAGES, body, authorization="Bearer 0123456789abcdef")
        assert (full.status, full.json["error"]["type"]) == (429, "rate_limit_error")
        assert full.headers["retry-after"] == "2"
        served.engine.refusal = None
        served.engine.halt_after = 0
        late = await served.ask(MESSAGES, body, x_request_timeout="0.2", **known)
        assert (late.status, late.json["error"]["type"]) == (504, "timeout_error")
        await served.handler.drain(0)
        away = await served.ask(MESSAGES, body, **known)
        assert (away.status, away.json["error"]["type"]) == (503, "overloaded_error")


async def test_without_a_template_the_reason_is_told() -> None:
    async with served_http() as served:
        status, _, message = await refusal(served)
    assert (status, "--chat-template" in message) == (400, True)
