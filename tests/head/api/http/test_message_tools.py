"""Tools and thinking in /v1/messages: what reaches the template and the engine, and what comes back as blocks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ppserve.errors import RequestFailed
from tests.fake_engine import FakeEngine
from tests.head.api.http.asking import ANSWER, ROOMY, Served, served_http
from tests.head.api.http.test_messages import COUNT, MESSAGES

WEATHER = {
    "name": "weather",
    "description": "Tells it.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TIME = {"type": "custom", "name": "time", "input_schema": {"type": "object"}}
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [WEATHER, TIME],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "seed": 1,
    "max_tokens": 500,
}
THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": hashlib.sha256(b"Hm.").hexdigest()}
USES = [
    {"type": "tool_use", "name": "weather", "input": {"city": "Bern"}},
    {"type": "tool_use", "name": "time", "input": {}},
]


async def answer(served: Served, **body: object) -> Any:
    told = await served.ask(MESSAGES, {**ASKED, **body})
    assert told.status == 200, told.body
    return told.json


async def events(served: Served, **body: object) -> list[tuple[str, Any]]:
    return (await served.ask(MESSAGES, {**ASKED, **body, "stream": True})).named_events


def joined(events: list[tuple[str, Any]]) -> list[Any]:
    """The content that these events make: each block begins, grows and ends before the next."""
    content: list[Any] = []
    pieces: list[str] = []
    is_open = False
    for name, event in events:
        match name:
            case "content_block_start":
                assert (event["index"], is_open) == (len(content), False)
                content.append(dict(event["content_block"]))
                pieces, is_open = [], True
            case "content_block_delta":
                assert (event["index"], is_open) == (len(content) - 1, True)
                delta, block = event["delta"], content[-1]
                kind, field = {
                    "text": ("text_delta", "text"),
                    "thinking": ("thinking_delta", "thinking"),
                    "tool_use": ("input_json_delta", "partial_json"),
                }[block["type"]]
                if delta["type"] == "signature_delta":
                    block["signature"] += delta["signature"]
                    continue
                assert delta["type"] == kind
                pieces.append(delta[field])
            case "content_block_stop":
                assert (event["index"], is_open) == (len(content) - 1, True)
                block, text, is_open = content[-1], "".join(pieces), False
                if block["type"] == "tool_use":
                    assert block["input"] == {}
                    block["input"] = json.loads(text)
                else:
                    assert block[block["type"]] == ""
                    block[block["type"]] = text
    assert not is_open
    return content


async def test_an_answer_is_thinking_text_and_uses_whole_and_streamed(tool_served: Served) -> None:
    tool_served.engine.said = ANSWER.encode()
    whole = await answer(tool_served)
    assert whole["stop_reason"] == "tool_use"
    thought, text, *uses = whole["content"]
    assert (thought, text) == (THOUGHT, {"type": "text", "text": "I look."})
    ids = [use.pop("id") for use in uses]
    assert uses == USES
    assert len({*ids}) == 2
    streamed = await events(tool_served)
    assert joined(streamed) == (await answer(tool_served))["content"]
    assert streamed[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert streamed[-2][1]["usage"] == whole["usage"]


async def test_ids_are_the_same_when_the_engine_breaks_and_the_call_is_repeated(tool_served: Served) -> None:
    tool_served.engine.said = ANSWER.encode()
    engine = tool_served.engine
    engine.break_error, engine.break_after, engine.num_breaks = RequestFailed("lost"), len(ANSWER) - 10, 1
    *broken, error = await events(tool_served)
    assert error[0] == "error"
    begun = [event["content_block"] for name, event in broken if name == "content_block_start"]
    repeated = await events(tool_served)
    assert [e["content_block"] for name, e in repeated if name == "content_block_start"] == begun
    assert len(begun) == 4


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}])
async def test_a_caller_who_did_not_ask_for_thoughts_is_told_none(tool_served: Served, thinking: object) -> None:
    tool_served.engine.said = ANSWER.encode()
    whole = await answer(tool_served, thinking=thinking)
    assert [block["type"] for block in whole["content"]] == ["text", "tool_use", "tool_use"]
    assert joined(await events(tool_served, thinking=thinking)) == whole["content"]
    assert whole["usage"]["output_tokens"] == len(ANSWER)


async def test_without_calls_nothing_but_the_text_is_there(tool_served: Served) -> None:
    tool_served.engine.said = b"Hello <b>"
    whole = await answer(tool_served)
    assert (whole["content"], whole["stop_reason"]) == ([{"type": "text", "text": "Hello <b>"}], "end_turn")


@pytest.mark.parametrize(
    ("said", "given"),
    [
        ('{"city": "Bern", "days": [1, 2], "unit": "C', {"city": "Bern", "days": [1, 2]}),
        ('{"city": "Bern", "days": 1', {"city": "Bern"}),
        ("", {}),
    ],
)
async def test_an_answer_that_its_length_cuts_has_the_members_that_are_whole(
    tool_served: Served, said: str, given: dict[str, Any]
) -> None:
    begun = '<tool_call>\n{"name": "weather", "arguments": ' + said
    tool_served.engine.said = begun.encode() + b" and more"
    whole = await answer(tool_served, max_tokens=len(begun))
    assert whole["stop_reason"] == "max_tokens"
    assert [(use["name"], use["input"]) for use in whole["content"]] == [("weather", given)]
    streamed = await events(tool_served, max_tokens=len(begun))
    pieces = [event["delta"]["partial_json"] for name, event in streamed if name == "content_block_delta"]
    assert "".join(pieces) == said


@pytest.mark.parametrize("arguments", ['["Bern"]', '"Bern"', '{"city": "\\ud800"}', '{"city": Bern}', "null"])
async def test_arguments_that_are_no_object_are_an_empty_one(tool_served: Served, arguments: str) -> None:
    tool_served.engine.said = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'.encode()
    whole = await answer(tool_served)
    assert [(use["name"], use["input"]) for use in whole["content"]] == [("weather", {})]


async def test_the_template_is_shown_tools_and_a_history_of_uses(tool_served: Served) -> None:
    use = {"type": "tool_use", "id": "c", "name": "time", "input": {}}
    result = {
        "type": "tool_result",
        "tool_use_id": "c",
        "is_error": True,
        "content": [{"type": "text", "text": "no"}],
    }
    messages = [
        *ASKED["messages"],
        {"role": "assistant", "content": [THOUGHT, {"type": "redacted_thinking", "data": "x"}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
    ]
    shown = [
        {"name": "weather", "description": "Tells it.", "parameters": WEATHER["input_schema"]},
        {"name": "time", "parameters": {"type": "object"}},
    ]
    written = [json.dumps({"type": "function", "function": tool}) + "<eos>" for tool in shown]
    told = await tool_served.ask(COUNT, {**ASKED, "messages": messages})
    await answer(tool_served, messages=messages, max_tokens=1)
    prompt_ids = tool_served.engine.requests[-1].prompt_ids
    prompt = tool_served.handler.tokenizer.decode(list(prompt_ids))
    history = 'assistant:\n<tool_call>{"name": "time", "arguments": {}}</tool_call>tool:no\nuser:Well?\n'
    assert prompt == "".join(written) + "user:hi\n" + history
    assert told.json == {"input_tokens": len(prompt_ids)}
    none = {**ASKED, "messages": messages, "tool_choice": {"type": "none"}}
    without = (await tool_served.ask(COUNT, none)).json
    assert told.json["input_tokens"] - without["input_tokens"] == sum(len(tool) - 4 for tool in written)


async def test_a_use_that_must_be_has_a_form(tool_served: Served) -> None:
    """Which reaches the engine as a filter; one that may be has none."""
    named = {"type": "tool", "name": "time"}
    for choice, is_formed in (({"type": "any"}, True), (named, True), ({"type": "auto"}, False), (None, False)):
        await answer(tool_served, tool_choice=choice, max_tokens=1)
        assert (tool_served.engine.filters[-1] is not None) == is_formed, choice
    await answer(tool_served, tools=[{**TIME, "strict": True}], max_tokens=1)
    assert tool_served.engine.filters[-1] is not None


async def test_one_use_where_parallel_ones_are_disabled(tool_served: Served) -> None:
    tool_served.engine.said = ANSWER.encode()
    whole = await answer(tool_served, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.get("name") for block in whole["content"]] == [None, None, "weather"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [WEATHER, {"name": "f"}]}, "tools[1].input_schema"),
        ({"tools": [WEATHER, {"name": "a b", "input_schema": {}}]}, "tools[1].name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type"),
        ({"tools": [{"name": f"f{n}", "input_schema": {}} for n in range(129)]}, "tools"),
        ({"tool_choice": {"type": "required"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [], "tool_choice": {"type": "any"}}, "tool_choice"),
        (
            {"tool_choice": {"type": "any"}, "output_config": {"format": {"type": "json_object"}}},
            "output_config.format",
        ),
        ({"tool_choice": {"type": "any"}, "ignore_eos": True}, "ignore_eos"),
        ({"tools": [{"name": "f", "input_schema": {"not": {}}}], "tool_choice": {"type": "any"}}, "tools"),
    ],
)
async def test_a_refusal_names_the_field(tool_served: Served, body: dict[str, Any], field: str) -> None:
    told = await tool_served.ask(MESSAGES, {**ASKED, **body})
    assert (told.status, told.json["error"]["type"]) == (400, "invalid_request_error")
    assert told.json["error"]["message"].partition(":")[0] == field
    assert tool_served.engine.requests == []


@pytest.fixture
async def gpt_oss() -> AsyncIterator[Served]:
    async with served_http(
        FakeEngine(ROOMY), chat_template=Path(__file__).parents[1] / "templates" / "gpt-oss.jinja"
    ) as served:
        yield served


async def test_channels_are_not_shown(gpt_oss: Served) -> None:
    gpt_oss.engine.said = (
        b"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        b"<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        b'{"city": "Bern"}<|call|>'
    )
    for thinking in (ASKED["thinking"], None):
        whole = await answer(gpt_oss, thinking=thinking)
        found = [{k: v for k, v in block.items() if k != "id"} for block in whole["content"]]
        assert found == [THOUGHT] * bool(thinking) + [{"type": "text", "text": "I look."}, USES[0]]
        streamed = await events(gpt_oss, thinking=thinking)
        assert joined(streamed) == whole["content"]
        assert "<|" not in json.dumps(streamed) + json.dumps(whole)
