"""Tools and reasoning in /v1/responses: with OpenAI's own client, and what coding agents send."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, pydantic_function_tool
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from ppserve.head.api.http.bodies import to_body
from ppserve.head.api.http.openai_responses import ResponsesBody
from tests.fake_engine import FakeEngine
from tests.head.api.http.asking import ANSWER, ROOMY, Served, served_http
from tests.head.api.http.test_responses import RESPONSES

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Tells it.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
TIME = {"type": "function", "name": "time", "parameters": None, "strict": None}
ASKED: dict[str, Any] = {"input": "hi", "tools": [WEATHER, TIME], "seed": 1, "max_output_tokens": 500}
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


async def answer(served: Served, **body: object) -> Any:
    told = await served.ask(RESPONSES, {**ASKED, **body})
    assert told.status == 200, told.body
    Response.model_validate_json(told.body, strict=True)
    return told.json


async def events(served: Served, **body: object) -> list[Any]:
    """The events, each as OpenAI describes it."""
    told = (await served.ask(RESPONSES, {**ASKED, **body, "stream": True})).named_events
    assert [event["sequence_number"] for _, event in told] == list(range(len(told)))
    for _, event in told:
        EVENT.validate_json(json.dumps(event), strict=True)
    return [event for _, event in told]


def told(response: Any) -> list[Any]:
    """The output without ids that differ in each response."""
    return [{name: value for name, value in item.items() if name != "id"} for item in response["output"]]


def rebuilt(events: list[Any]) -> list[Any]:
    """The items that these events make: each is added, grows, and is done as it grew, before the next."""
    items: list[Any] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            assert all(item["status"] != "in_progress" for item in items)
            items.append(event["item"])
            continue
        if "output_index" not in event:
            continue
        assert event["output_index"] == len(items) - 1
        item = items[-1]
        assert event.get("item_id", item["id"]) == item["id"]
        match kind.split("."):
            case ["content_part", "added"]:
                item["content"].append(dict(event["part"]))
            case ["content_part", "done"]:
                assert item["content"] == [event["part"]]
            case ["function_call_arguments", "delta"]:
                item["arguments"] += event["delta"]
            case ["function_call_arguments", "done"]:
                assert (item["arguments"], item["name"]) == (event["arguments"], event["name"])
            case ["output_text" | "reasoning_text", "delta"]:
                item["content"][0]["text"] += event["delta"]
            case ["output_text" | "reasoning_text", "done"]:
                assert item["content"][0]["text"] == event["text"]
            case ["output_item", "done"]:
                status, packed = event["item"]["status"], event["item"].get("encrypted_content")
                assert event["item"] == item | {"status": status} | (
                    {"encrypted_content": packed} if packed else {}
                )
                items[-1] = event["item"]
    return items


async def test_an_answer_is_reasoning_a_message_and_calls_whole_and_streamed(tool_served: Served) -> None:
    tool_served.engine.said = ANSWER.encode()
    whole = await answer(tool_served)
    assert (whole["status"], whole["tools"], whole["tool_choice"]) == ("completed", ASKED["tools"], "auto")
    reasoning, message, weather, time = told(whole)
    thought = {"type": "reasoning_text", "text": "Hm."}
    assert reasoning == {"type": "reasoning", "status": "completed", "summary": [], "content": [thought]}
    assert (message["role"], message["content"][0]["text"]) == ("assistant", "I look.")
    assert len({weather.pop("call_id"), time.pop("call_id")}) == 2
    called = {"type": "function_call", "status": "completed"}
    assert weather == {**called, "name": "weather", "arguments": '{"city": "Bern"}'}
    assert time == {**called, "name": "time", "arguments": "{}"}
    streamed = await events(tool_served)
    assert rebuilt(streamed) == streamed[-1]["response"]["output"]
    assert told(streamed[-1]["response"]) == told(whole)
    assert streamed[-1]["response"]["usage"] == whole["usage"]
    assert streamed[-1]["type"] == "response.completed"


@pytest.mark.parametrize("interval", [1, 7, 1000])
async def test_tokens_of_a_reasoning_are_counted(tool_served: Served, interval: int) -> None:
    """A letter is a token here. Tags and the blanks beside them do not count."""
    long = "<think>\nHm, hm. \n </think>Yes."
    for said, count in ((ANSWER, 3), ("I look.", 0), ("<think>Hm", 2), (long, len("Hm, hm."))):
        tool_served.engine.said = said.encode()
        whole = (await answer(tool_served))["usage"]
        assert whole["output_tokens_details"] == {"reasoning_tokens": count}
        assert whole["output_tokens"] == len(said)
        streamed = await events(tool_served, stream_interval=interval)
        assert streamed[-1]["response"]["usage"] == whole


class Weather(BaseModel):
    """Tells it."""

    city: str


async def test_openai_s_client_and_its_stream_helper_read_calls(tool_served: Served) -> None:
    tool_served.engine.said = ANSWER.replace('\n<tool_call>\n{"name": "time"}\n</tool_call>', "").encode()
    asked: Any = {
        "model": "fake",
        "input": "hi",
        "tools": [pydantic_function_tool(Weather, name="weather")],
        "max_output_tokens": 500,
        "extra_body": {"seed": 1},
    }
    url = f"http://127.0.0.1:{tool_served.port}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        parsed = await client.responses.parse(**asked)
        async with client.responses.stream(**asked) as stream:
            final = await stream.get_final_response()
    for response in (parsed, final):
        call = response.output[-1]
        assert call.type == "function_call"
        assert (call.name, call.parsed_arguments) == ("weather", Weather(city="Bern"))
        assert response.output_text == "I look."
    assert parsed.output[-1].to_dict() | {"id": ""} == final.output[-1].to_dict() | {"id": ""}
    assert tool_served.engine.filters[-1] is not None  # such tools are strict


@pytest.mark.parametrize(
    ("length", "statuses"),
    [
        (ANSWER.index("m.<"), ["incomplete"]),
        (ANSWER.index("ook"), ["completed", "incomplete"]),
        (ANSWER.index("Bern") + 2, ["completed", "completed", "incomplete"]),
        (ANSWER.index('\n<tool_call>\n{"name": "time"'), ["completed"] * 3),
    ],
)
async def test_what_its_length_cuts_is_incomplete(tool_served: Served, length: int, statuses: list[str]) -> None:
    tool_served.engine.said = ANSWER.encode()
    whole = await answer(tool_served, max_output_tokens=length)
    assert whole["status"] == "incomplete"
    assert [item["status"] for item in whole["output"]] == statuses
    for interval in (1, 1000):
        streamed = await events(tool_served, max_output_tokens=length, stream_interval=interval)
        assert rebuilt(streamed) == streamed[-1]["response"]["output"]
        assert told(streamed[-1]["response"]) == told(whole)


async def test_the_template_is_shown_functions_and_a_history_of_calls(tool_served: Served) -> None:
    """A call's arguments may be no JSON: the model has written them."""
    call = {"type": "function_call", "call_id": "c", "name": "time", "arguments": '{"a": 1, "b'}
    output = {"type": "function_call_output", "call_id": "c", "output": "noon"}
    await answer(tool_served, input=[{"role": "user", "content": "hi"}, call, output], max_output_tokens=1)
    prompt_ids = tool_served.engine.requests[-1].prompt_ids
    shown = [
        {"name": "weather", "description": "Tells it.", "parameters": WEATHER["parameters"]},
        {"name": "time"},
    ]
    written = [json.dumps({"type": "function", "function": tool}) + "<eos>" for tool in shown]
    history = 'user:hi\nassistant:\n<tool_call>{"name": "time", "arguments": {"a": 1}}</tool_call>tool:noon\n'
    assert tool_served.handler.tokenizer.decode(list(prompt_ids)) == "".join(written) + history
    await answer(tool_served, tool_choice="none", max_output_tokens=1)
    assert bytes(tool_served.engine.requests[-1].prompt_ids) == b"user:hi\n"


async def test_a_thought_comes_back_as_its_packed_content_too(tool_served: Served) -> None:
    """Some agents give back nothing else of a reasoning."""
    tool_served.engine.said = ANSWER.encode()
    asked = {"include": ["reasoning.encrypted_content"], "store": False}
    first = (await answer(tool_served, **asked))["output"][0]
    streamed = await events(tool_served, **asked)
    assert rebuilt(streamed)[0] == first | {"id": streamed[-1]["response"]["output"][0]["id"]}

    def reasoning_of(**item: object) -> object:
        items = [{"type": "reasoning", "summary": [], **item}, {"role": "assistant", "content": "a"}]
        return to_body({"input": items}, ResponsesBody).prompts[0].messages[0].shown.get("reasoning_content")

    assert reasoning_of(encrypted_content=first["encrypted_content"]) == "Hm."
    for foreign in ("gAAAA", "ppserve:%", "ppserve:/w==", None):
        assert reasoning_of(encrypted_content=foreign) is None
        assert reasoning_of(encrypted_content=foreign, summary=[{"type": "summary_text", "text": "s"}]) == "s"


async def test_a_call_that_must_be_has_a_form(tool_served: Served) -> None:
    named = {"type": "function", "name": "time"}
    for choice, is_formed in (("required", True), (named, True), ("auto", False), ("none", False), (None, False)):
        await answer(tool_served, tool_choice=choice, max_output_tokens=1)
        assert (tool_served.engine.filters[-1] is not None) == is_formed, choice
    tool_served.engine.said = ANSWER.encode()
    output = (await answer(tool_served, parallel_tool_calls=False))["output"]
    assert [item.get("name") for item in output] == [None, None, "weather"]


CUSTOM = {"type": "custom", "name": "x"}
SPACES: list[Any] = [
    {"type": "namespace", "name": "functions", "description": "", "tools": [WEATHER]},
    {
        "type": "namespace",
        "name": "mcp__clock__",
        "description": "",
        "tools": [TIME, {"type": "custom", "name": "x"}],
    },
]


async def test_functions_in_namespaces_are_called_by_their_full_names(tool_served: Served) -> None:
    tool_served.engine.said = ANSWER.replace('"time"', '"mcp__clock__time"').encode()
    whole = await answer(tool_served, tools=SPACES)
    calls = [(item["name"], item.get("namespace")) for item in whole["output"] if item["type"] == "function_call"]
    assert calls == [("weather", None), ("time", "mcp__clock__")]
    streamed = await events(tool_served, tools=SPACES)
    assert told({"output": rebuilt(streamed)}) == told(whole)
    history = [{"role": "user", "content": "hi"}, whole["output"][-1]]
    await answer(tool_served, tools=SPACES, input=history, max_output_tokens=1)
    assert b'assistant:\n<tool_call>{"name": "mcp__clock__time"' in bytes(
        token_id for token_id in tool_served.engine.requests[-1].prompt_ids if token_id < 256
    )
    chosen = {"type": "function", "name": "time", "namespace": "mcp__clock__"}
    for choice in (chosen, {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}, chosen]}):
        whole = await answer(tool_served, tools=SPACES, tool_choice=choice, max_output_tokens=1)
        assert whole["tool_choice"] == choice
        allowed = tool_served.engine.filters[-1]
        assert allowed is not None
        calls = (
            f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}' for name in ("mcp__clock__time", "weather")
        )
        right, wrong = ([*call.encode()] for call in calls)
        assert allowed.accepts([], right) == len(right)
        assert allowed.accepts([], wrong) < len(wrong)


async def test_tools_that_openai_runs_are_left_out_and_named(tool_served: Served) -> None:
    search = {"type": "web_search", "external_web_access": False}
    body = {**ASKED, "tools": [search, *SPACES, CUSTOM], "max_output_tokens": 1}
    said = await tool_served.ask(RESPONSES, body)
    assert said.headers["x-ignored-fields"] == "tools.web_search, tools.custom, tools.custom"
    assert said.json["tools"] == SPACES
    prompt_ids = tool_served.engine.requests[-1].prompt_ids
    await answer(tool_served, tools=SPACES, max_output_tokens=1)
    assert tool_served.engine.requests[-1].prompt_ids == prompt_ids
    await answer(tool_served, tools=[search], max_output_tokens=1)
    assert bytes(tool_served.engine.requests[-1].prompt_ids) == b"user:hi\n"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [WEATHER, {"type": "function"}]}, "tools[1].name"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
            "tools[0].tools[0].name",
        ),
        ({"tools": [WEATHER, {"type": "function", "name": "a b"}]}, "tools[1].name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "none", "tools": [TIME]}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [TIME]}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ],
)
async def test_a_refusal_names_the_field(tool_served: Served, body: dict[str, Any], param: str) -> None:
    status, named, message = await tool_served.refusal(RESPONSES, **{**ASKED, **body})
    assert (status, named) == (400, param), message
    assert tool_served.engine.requests == []


@pytest.fixture
async def gpt_oss() -> AsyncIterator[Served]:
    path = Path(__file__).parents[1] / "templates" / "gpt-oss.jinja"
    async with served_http(FakeEngine(ROOMY), chat_template=path) as served:
        yield served


async def test_channels_are_not_shown(gpt_oss: Served) -> None:
    gpt_oss.engine.said = (
        b"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        b'<|constrain|>json<|message|>{"city": "Bern"}<|call|>'
    )
    streamed = await events(gpt_oss)
    output = rebuilt(streamed)
    assert [item["type"] for item in output] == ["reasoning", "function_call"]
    assert (output[0]["content"][0]["text"], output[1]["arguments"]) == ("Hm.", '{"city": "Bern"}')
    assert told(await answer(gpt_oss)) == told(streamed[-1]["response"])
    assert streamed[-1]["response"]["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}
    assert "<|" not in json.dumps(streamed)
