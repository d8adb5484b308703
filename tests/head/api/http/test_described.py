"""Bodies made of what /openapi.json says are answered or refused, and both in the form that is described.

The forms of answers are OpenAI's own types, and for messages a schema of Anthropic's published shape.
"""

from __future__ import annotations

import asyncio
import http.client
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from ppserve.head.api.http.openapi import describe_paths
from ppserve.head.api.http.server import PATHS
from tests.head.api.http.asking import Served
from tests.head.api.http.test_fuzz import EXAMPLES, anything

DOCUMENT = describe_paths(PATHS, "0", has_keys=False)
DOORS = [each.path for each in PATHS if each.generates or each.path.endswith("count_tokens")]

# Words that mean something, where the description says no more than that there is a text.
WORDS: dict[str, list[Any]] = {
    "role": ["user", "assistant", "system", "tool"],
    "type": [
        *("text", "thinking", "tool_use", "tool_result", "input_text", "message", "function_call", "reasoning"),
        *("function_call_output", "function", "custom", "namespace", "web_search", "auto", "any", "tool", "none"),
        *("enabled", "disabled", "json_object", "json_schema"),
    ],
    "effort": ["none", "low", "high", "", None],
    "name": ["look", "take", "go"],
    "model": ["fake", None],
    "tool_choice": ["auto", "none", "required", None],
    "request_id": ["a", None],
}
FEW: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("max_tokens", "max_output_tokens", "max_completion_tokens"), st.integers(0, 30)),
    **dict.fromkeys(("n", "best_of"), st.integers(1, 3)),
    **dict.fromkeys(("arguments", "input"), st.dictionaries(st.text(max_size=5), anything, max_size=2)),
    "logprobs": st.integers(0, 3) | st.booleans(),
}
"""Smaller than what is allowed: not every answer needs four thousand tokens."""


def made_from(schema: dict[str, Any], name: str = "", depth: int = 0) -> st.SearchStrategy[Any]:
    """Values that a schema of the document allows. name: of the field that they are for."""
    if "$ref" in schema:
        return made_from(DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]], name, depth)
    if "anyOf" in schema:
        kinds = [{**schema, **kind} for kind in schema["anyOf"]]
        for kind in kinds:
            kind.pop("anyOf") if kind["anyOf"] is schema["anyOf"] else None
        return st.one_of([made_from(kind, name, depth) for kind in kinds])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            low, high = int(schema.get("minimum", -3)), int(schema.get("maximum", 300))
            return FEW.get(name, st.integers(low, high) | st.integers(max(0, low), min(high, 300)))
        case "number":
            return st.floats(schema.get("minimum", -3), schema.get("maximum", 300))
        case "string":
            return st.sampled_from(WORDS[name]) if name in WORDS else st.text(max_size=12)
        case "array":
            if depth >= 6:
                return st.builds(list)
            return st.lists(made_from(schema.get("items", {}), name, depth + 1), max_size=2 if depth else 4)
        case "object" if "properties" in schema:
            fields = schema["properties"]
            needed = {each: made_from(fields[each], each, depth + 1) for each in schema.get("required", ())}
            others = {each: field for each, field in fields.items() if each not in needed and depth < 6}
            return st.fixed_dictionaries(needed).flatmap(lambda begun: _with_some(begun, others, depth))
        case "object" if "additionalProperties" in schema:
            values = made_from(schema["additionalProperties"], "", depth + 1)
            return st.dictionaries(st.integers(0, 300).map(str), values, max_size=2)
        case "object":
            return FEW["input"]
    return anything


def _with_some(begun: dict[str, Any], others: dict[str, Any], depth: int) -> st.SearchStrategy[Any]:
    """`begun` with at most a few of the optional fields: with all of them there is always one that is refused."""
    chosen = st.lists(st.sampled_from(sorted(others)), max_size=3, unique=True) if others else st.just([])
    return chosen.flatmap(
        lambda names: st.fixed_dictionaries(
            {**{each: st.just(value) for each, value in begun.items()}}
            | {each: made_from(others[each], each, depth + 1) for each in names}
        )
    )


FUNCTION = {"name": "look", "parameters": {"type": "object"}}
TOOLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"tools": [{"type": "function", "function": FUNCTION}]},
    "/v1/messages": {
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
        "thinking": {"type": "adaptive"},
        "max_tokens": 500,
    },
    "/v1/responses": {"tools": [{"type": "function", **FUNCTION}], "max_output_tokens": 500},
}
"""What an answer needs to have all of its parts."""


def body_of(path: str) -> st.SearchStrategy[dict[str, Any]]:
    content = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]
    made = made_from(content["application/json"]["schema"])
    return made | made.map(lambda body: body | TOOLS.get(path, {}))


TEXT = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0}


def exactly(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


MESSAGE = {
    "type": "object",
    "properties": {
        "id": TEXT,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": TEXT,
        "content": {
            "type": "array",
            "items": {
                "oneOf": [
                    exactly(type={"const": "text"}, text=TEXT),
                    exactly(type={"const": "thinking"}, thinking=TEXT, signature=TEXT),
                    exactly(type={"const": "tool_use"}, id=TEXT, name=TEXT, input={"type": "object"}),
                ]
            },
        },
        "stop_reason": {"enum": ["end_turn", "tool_use", "stop_sequence", "max_tokens"]},
        "stop_sequence": {"type": ["string", "null"]},
        "usage": exactly(
            input_tokens=COUNT,
            output_tokens=COUNT,
            cache_read_input_tokens=COUNT,
            cache_creation_input_tokens=COUNT,
        ),
    },
    "required": ["id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"],
}


def events(content: bytes) -> Iterator[Any]:
    for line in content.splitlines():
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def check_answer(path: str, content: bytes, streams: bool) -> None:
    match path.removeprefix("/v1/"), streams:
        case "completions", _:
            for each in events(content) if streams else [json.loads(content)]:
                for choice in each["choices"]:
                    # OpenAI's type leaves out that there is none yet within a stream.
                    choice["finish_reason"] = choice["finish_reason"] or ("stop" if streams else None)
                    # And that the first token of a prompt has no probability.
                    for name in ("token_logprobs", "top_logprobs") if choice["logprobs"] else ():
                        scores = choice["logprobs"][name]
                        choice["logprobs"][name] = scores[1:] if scores[:1] == [None] else scores
                Completion.model_validate(each)
        case "chat/completions", _:
            for each in events(content) if streams else [json.loads(content)]:
                (ChatCompletionChunk if streams else ChatCompletion).model_validate(each)
        case "responses", True:
            for each in events(content):
                TypeAdapter(ResponseStreamEvent).validate_json(json.dumps(each), strict=True)
        case "responses", False:
            Response.model_validate_json(content, strict=True)
        case "messages/count_tokens", _:
            jsonschema.validate(json.loads(content), exactly(input_tokens={"type": "integer", "minimum": 1}))
        case "messages", False:
            jsonschema.validate(json.loads(content), MESSAGE)
        case "messages", True:
            first, *_, last = events(content)
            assert (first["type"], last["type"]) == ("message_start", "message_stop")
            message = first["message"] | {"stop_reason": "end_turn"}
            jsonschema.validate(message, MESSAGE)


def ask(port: int, path: str, body: dict[str, Any]) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("POST", path, json.dumps(body))
        answer = connection.getresponse()
        content = answer.read()
    finally:
        connection.close()
    if answer.status == 200:
        check_answer(path, content, bool(body.get("stream")) and not path.endswith("count_tokens"))
    else:
        assert 400 <= answer.status < 500, (body, content)
        responses = DOCUMENT["paths"][path]["post"]["responses"]
        named = responses["default"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        jsonschema.validate(json.loads(content), DOCUMENT["components"]["schemas"][named])
    return answer.status


@pytest.mark.parametrize("path", DOORS)
@pytest.mark.slow
async def test_what_is_described_is_answered_or_refused_in_its_form(tool_served: Served, path: str) -> None:
    tool_served.engine.said = (
        b'<think>Hm.</think>I look.<tool_call>{"name": "look", "arguments": {"at": 5, "in": [1, {}]}}</tool_call>'
    )
    seen: Counter[int] = Counter()

    @given(body=body_of(path))
    @settings(max_examples=EXAMPLES)
    def each(body: dict[str, Any]) -> None:
        seen[ask(tool_served.port, path, body)] += 1

    await asyncio.to_thread(each)
    assert seen[200] >= EXAMPLES // 20, seen
    assert seen[400] >= EXAMPLES // 20, seen
