"""Tools of chats: what reaches the template and the engine, what comes back, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import AsyncOpenAI

from ppserve.head.api.http.bodies import to_body
from ppserve.head.api.http.chat import ChatBody
from tests.fake_engine import FakeEngine
from tests.head.api.http.asking import ANSWER, ROOMY, Served, served_http

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells it.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
NAMED = {"type": "function", "function": {"name": "time"}}
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [WEATHER, TIME],
    "seed": 1,
    "max_tokens": 500,
}
OF_TYPE = "tools[0].function.parameters.type"
NO_TOOL = {"type": "function", "function": {"name": "other"}}
CALLS = [("weather", '{"city": "Bern"}'), ("time", "{}")]


def joined(events: list[Any], index: int = 0) -> dict[str, Any]:
    """The message that the events of one choice make, in the form of a whole one."""
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for event in events:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            for name in ("role", "content", "reasoning_content"):
                message[name] = message.get(name, "") + choice["delta"].get(name, "")
            for piece in choice["delta"].get("tool_calls", []):
                if piece["index"] == len(calls):
                    assert piece.keys() == {"index", "id", "type", "function"}
                    calls.append({**piece, "function": dict(piece["function"])})
                else:
                    assert piece.keys() == {"index", "function"}
                    calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return message | {"tool_calls": [{k: v for k, v in call.items() if k != "index"} for call in calls]}


async def test_an_answer_is_text_reasoning_and_calls_whole_and_streamed(tool_served: Served) -> None:
    tool_served.engine.said = ANSWER.encode()
    whole = (await tool_served.ask(CHAT, {**ASKED, "n": 2})).json
    for choice in whole["choices"]:
        message = choice["message"]
        assert (message["content"], message["reasoning_content"]) == ("I look.", "Hm.")
        assert [
            (call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]
        ] == CALLS
        assert [call["type"] for call in message["tool_calls"]] == ["function"] * 2
        assert choice["finish_reason"] == "tool_calls"
    ids = [call["id"] for choice in whole["choices"] for call in choice["message"]["tool_calls"]]
    assert len({*ids}) == 4
    events = (await tool_served.ask(CHAT, {**ASKED, "n": 2, "stream": True})).events
    for index in (0, 1):
        assert joined(events, index) == whole["choices"][index]["message"]
    assert [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]] == ["tool_calls"] * 2


async def test_without_calls_nothing_but_the_text_is_there(tool_served: Served) -> None:
    tool_served.engine.said = b"Hello <b>"
    choice = (await tool_served.ask(CHAT, ASKED)).json["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello <b>"}
    assert choice["finish_reason"] == "stop"


async def test_beside_a_response_format_an_answer_is_calls_or_text(tool_served: Served) -> None:
    asked = {**ASKED, "response_format": {"type": "json_object"}}
    tool_served.engine.said = b'{"a": "<tool_call>"}'
    choice = (await tool_served.ask(CHAT, asked)).json["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": '{"a": "<tool_call>"}'}
    assert choice["finish_reason"] == "stop"
    tool_served.engine.said = ANSWER.partition("</think>")[2].strip().removeprefix("I look.").encode()
    choice = (await tool_served.ask(CHAT, asked)).json["choices"][0]
    found = [(each["function"]["name"], each["function"]["arguments"]) for each in choice["message"]["tool_calls"]]
    assert (found, choice["finish_reason"]) == (CALLS, "tool_calls")


async def test_openai_s_client_and_its_stream_helper_read_calls(tool_served: Served) -> None:
    tool_served.engine.said = ANSWER.encode()
    asked: Any = {"model": "fake", **ASKED}
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{tool_served.port}/v1", api_key="none") as client:
        whole = await client.chat.completions.create(**asked)
        async with client.chat.completions.stream(**asked) as stream:
            final = await stream.get_final_completion()
    told = whole.choices[0].message
    found = final.choices[0].message
    assert found.content == told.content
    assert [(call.function.name, call.function.arguments) for call in found.tool_calls or ()] == CALLS  # type: ignore[union-attr]
    assert [call.id for call in found.tool_calls or ()] == [call.id for call in told.tool_calls or ()]


async def test_a_stream_that_is_cut_anywhere_goes_on_to_the_same_bytes(tool_served: Served) -> None:
    tool_served.engine.said = ANSWER.encode()
    asked = {**ASKED, "return_token_ids": True}
    whole = (await tool_served.ask(CHAT, asked)).json["choices"][0]["message"]
    events = (await tool_served.ask(CHAT, {**asked, "stream": True})).events
    for length in range(0, len(ANSWER), 7):
        held = events[: length + 1]  # the first has the role alone
        ids = [token_id for event in held for token_id in event["choices"][0].get("token_ids", [])]
        assert ANSWER.encode().startswith(bytes(ids))
        resumed = {**asked, "stream": True, "resume": {"token_ids": ids}}
        _, *rest = (await tool_served.ask(CHAT, resumed)).events
        assert joined(held + rest) == whole
        assert rest[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_an_answer_that_its_length_cuts_has_what_there_is(tool_served: Served) -> None:
    tool_served.engine.said = ANSWER.encode()
    limit = ANSWER.index("Bern") + 2
    choice = (await tool_served.ask(CHAT, {**ASKED, "max_tokens": limit})).json["choices"][0]
    assert choice["finish_reason"] == "length"
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == ['{"city": "Be']


async def test_the_template_is_shown_tools_and_earlier_calls(tool_served: Served) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "time", "arguments": "{}"}}
    history = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "noon <tool_call>"},
    ]
    messages = [*ASKED["messages"], *history]
    await tool_served.ask(CHAT, {**ASKED, "messages": messages, "tool_choice": "auto", "max_tokens": 1})
    prompt = tool_served.handler.tokenizer.decode(tool_served.engine.requests[-1].prompt_ids)
    assert prompt.startswith(f"{json.dumps(WEATHER)}<eos>{json.dumps(TIME)}<eos>user:hi")
    assert 'assistant:\n<tool_call>{"name": "time", "arguments": {}}</tool_call>' in prompt
    assert "tool:noon" in prompt
    for nothing in ({"tool_choice": "none"}, {"tools": []}):
        await tool_served.ask(CHAT, {**ASKED, **nothing, "max_tokens": 1})
        assert tool_served.handler.tokenizer.decode(tool_served.engine.requests[-1].prompt_ids).startswith(
            "user:hi"
        )


async def test_a_reasoning_that_the_prompt_has_begun_is_one(tool_served: Served) -> None:
    tool_served.engine.said = b"Hm.</think>Yes."
    thinks = {"chat_template_kwargs": {"thinks": True}}
    message = (await tool_served.ask(CHAT, {**ASKED, **thinks})).json["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    message = (await tool_served.ask(CHAT, {**ASKED, **thinks, "add_generation_prompt": False})).json["choices"][
        0
    ]["message"]
    assert message["content"] == "Hm.</think>Yes."


async def test_a_call_that_is_required_has_a_form(tool_served: Served) -> None:
    """Which reaches the engine as a filter; one that may be made has none."""
    for choice, is_formed in (("required", True), (NAMED, True), ("auto", False), ("none", False), (None, False)):
        await tool_served.ask(CHAT, {**ASKED, "tool_choice": choice, "max_tokens": 1})
        assert (tool_served.engine.filters[-1] is not None) == is_formed, choice
    strict = {"type": "function", "function": {**TIME["function"], "strict": True}}
    await tool_served.ask(CHAT, {**ASKED, "tools": [strict], "max_tokens": 1})
    assert tool_served.engine.filters[-1] is not None


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def test_tools_that_are_not_allowed_are_shown_and_cannot_be_called(tool_served: Served) -> None:
    engine = tool_served.engine
    prompts = []
    for choice in ("auto", allowed("auto", TIME), allowed("required", TIME), allowed("auto", TIME, WEATHER)):
        answer = await tool_served.ask(CHAT, {**ASKED, "tool_choice": choice, "max_tokens": 1})
        assert answer.status == 200, answer.body
        prompts.append(engine.requests[-1].prompt_ids)
    assert len({*prompts}) == 1  # which the prefix cache finds again
    unbound, free, forced, every = engine.filters[-4:]
    assert (unbound, every) == (None, None)
    assert free is not None
    assert forced is not None
    for name, says, is_called in (("time", free, True), ("weather", free, False), ("time", forced, True)):
        call = [*f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'.encode()]
        assert (says.accepts([], call) == len(call)) == is_called
    assert free.accepts([], [*b"Hello"]) == 5
    assert forced.accepts([], [*b"Hello"]) == 0


OLDER: dict[str, Any] = {
    "messages": ASKED["messages"],
    "functions": [WEATHER["function"], TIME["function"]],
    "seed": 1,
    "max_tokens": 500,
}


async def test_the_older_form_has_one_call(tool_served: Served) -> None:
    tool_served.engine.said = ANSWER.encode()
    choice = (await tool_served.ask(CHAT, OLDER)).json["choices"][0]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "weather", "arguments": '{"city": "Bern"}'}
    assert "tool_calls" not in choice["message"]
    events = (await tool_served.ask(CHAT, {**OLDER, "stream": True})).events
    pieces = [
        e["choices"][0]["delta"]["function_call"] for e in events if "function_call" in e["choices"][0]["delta"]
    ]
    assert [piece["name"] for piece in pieces if "name" in piece] == ["weather"]
    assert "".join(piece["arguments"] for piece in pieces) == '{"city": "Bern"}'


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [WEATHER, {"type": "function", "function": {"name": "a b"}}]}, "tools[1].function.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f" * 129}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(129)]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        *(
            ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": kind}}}]}, OF_TYPE)
            for kind in ("array", ["string", "null"], 5, {}, [])
        ),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "custom", "function": {"name": "time"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": allowed("auto")}, "tool_choice"),
        ({"tool_choice": allowed("auto", {"type": "custom", "function": {"name": "time"}})}, "tool_choice"),
        ({"tool_choice": allowed("none", TIME)}, "tool_choice"),
        ({"tool_choice": allowed("auto", TIME, NO_TOOL)}, "tool_choice"),
        ({"tools": None, "tool_choice": allowed("auto", TIME)}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tools": None, "functions": [{"name": "a b"}]}, "functions[0].name"),
        ({"tools": None, "functions": [{"name": "a"}], "function_call": {"name": "b"}}, "function_call"),
        ({"tools": None, "functions": [{"name": "a"}], "function_call": "required"}, "function_call"),
        ({"tools": None, "function_call": {"name": "b"}}, "function_call"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    ],
)
async def test_a_refusal_names_the_field(tool_served: Served, body: dict[str, Any], param: str) -> None:
    status, named, message = await tool_served.refusal(CHAT, **{**ASKED, **body})
    assert (status, named) == (400, param), message
    assert tool_served.engine.requests == []


async def test_a_schema_that_cannot_be_forced_is_refused_with_its_tool(tool_served: Served) -> None:
    wrong = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"not": {}}}}}}
    status, named, message = await tool_served.refusal(
        CHAT, **{**ASKED, "tools": [wrong], "tool_choice": "required"}
    )
    assert (status, named) == (400, "tools")
    assert "at /properties/a/not: the parameters of 'f': the keyword 'not' is not enforced here" in message
    assert (await tool_served.ask(CHAT, {**ASKED, "tools": [wrong], "max_tokens": 1})).status == 200


async def test_a_template_without_a_known_format_refuses_tools_that_may_be_called(served: Served) -> None:
    status, named, message = await served.refusal(CHAT, **ASKED)
    assert (status, named) == (400, "tools")
    assert "--tool-format" in message
    assert (await served.ask(CHAT, {**ASKED, "tool_choice": "none", "max_tokens": 1})).status == 200
    served.engine.said = b'{"name": "time", "arguments": {}}'
    forced = (await served.ask(CHAT, {**ASKED, "tool_choice": NAMED})).json["choices"][0]
    assert [call["function"]["name"] for call in forced["message"]["tool_calls"]] == ["time"]
    assert forced["message"]["content"] is None


async def test_the_operator_s_format_counts(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("template") / "plain.jinja"
    path.write_text("{{ messages[0].content }}")
    async with served_http(
        FakeEngine(ROOMY), chat_template=path, tool_format="mistral", reasoning_format="none"
    ) as served:
        served.engine.said = b'<think>a</think>[TOOL_CALLS] [{"name": "time"}]'
        message = (await served.ask(CHAT, ASKED)).json["choices"][0]["message"]
    assert message["content"] == "<think>a</think>"
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["time"]


def test_tools_are_as_they_were_given() -> None:
    """A schema's 1.0 stays what it is, in the form too."""
    schema = {"type": "object", "properties": {"a": {"const": 1.0}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": None}}
    body = to_body({**ASKED, "tools": [tool]}, ChatBody)
    assert json.dumps(body.prompts[0].tooling.tools[0].parameters) == json.dumps(schema)
