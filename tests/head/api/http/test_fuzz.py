"""Strange requests get 2xx or 4xx, and harm nobody else."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.head.api.http.asking import Served

numbers = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([0.0, 1.0, -1.0, 0.5])
small = st.integers(-1, 40)
counts = small | st.integers(-(2**70), 2**70)
ids = st.integers(0, 300) | counts
texts = st.text(max_size=80)
anything = st.recursive(
    st.none() | st.booleans() | counts | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
prompts = (
    texts
    | st.lists(ids, max_size=70)
    | st.lists(texts, max_size=4)
    | st.lists(st.lists(ids, max_size=70), max_size=4)
    | anything
)
sampling: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["fake", "tiny"]) | texts,
    **dict.fromkeys(["temperature", "top_p", "min_p", "repetition_penalty"], numbers),
    **dict.fromkeys(["frequency_penalty", "presence_penalty"], numbers),
    **dict.fromkeys(
        ["top_k", "seed", "max_tokens", "min_tokens", "stream_interval", "priority", "truncate_prompt_tokens"],
        counts,
    ),
    "n": small,
    "logit_bias": st.dictionaries(ids.map(str) | texts, numbers, max_size=4),
    "stop": texts | st.lists(texts, max_size=6),
    "stop_token_ids": st.lists(ids, max_size=70),
    **dict.fromkeys(["ignore_eos", "include_stop_str_in_output", "return_token_ids", "stream"], st.booleans()),
    "return_tokens_as_token_ids": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
    "request_id": texts,
    "resume": st.fixed_dictionaries({}, optional={"index": small, "token_ids": st.lists(ids, max_size=70)}),
}
FORMS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
sampling |= dict.fromkeys(FORMS, st.none() | st.booleans() | anything)
sampling |= {
    "allowed_token_ids": st.lists(ids, max_size=70),
    "bad_words": st.lists(texts, max_size=6),
    **dict.fromkeys(["best_of", "prompt_logprobs"], small),
    "max_completion_tokens": counts,
    "skip_special_tokens": st.booleans(),
}
completion = {"echo": st.booleans(), "logprobs": small, "suffix": texts}
message = st.fixed_dictionaries({"role": texts}, optional={"content": texts | anything})
chat = {
    "messages": st.lists(message, max_size=4) | anything,
    "logprobs": st.booleans(),
    "top_logprobs": small,
    **dict.fromkeys(("continue_final_message", "add_generation_prompt"), st.booleans()),
    "chat_template_kwargs": st.dictionaries(texts, anything, max_size=3),
    "documents": st.lists(anything, max_size=2),
    "tools": st.lists(anything, max_size=1),
    "tool_choice": st.sampled_from(["none", "auto"]),
}

schemas = st.fixed_dictionaries(
    {"type": st.sampled_from(["object", "string"])},
    optional={"properties": st.dictionaries(texts, anything, max_size=2), "required": st.lists(texts, max_size=2)},
)
names = st.sampled_from(["look", "look_2"]) | texts
tools = st.lists(
    st.fixed_dictionaries(
        {"name": names},
        optional={
            "type": st.sampled_from(["function", "custom", "namespace", "web_search"]) | texts,
            "description": texts,
            **dict.fromkeys(("input_schema", "parameters"), schemas | anything),
            "strict": st.booleans(),
            "tools": st.lists(st.fixed_dictionaries({"type": st.just("function"), "name": names}), max_size=2),
        },
    ),
    max_size=3,
)
choices = st.sampled_from(["none", "auto", "required"]) | st.fixed_dictionaries(
    {"type": st.sampled_from(["auto", "any", "tool", "none", "function"]) | texts}, optional={"name": names}
)
text_blocks = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts}), max_size=2)
# Contents of the newer doors: blocks and items, mostly of their types.
contents = texts | st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "input_text", "thinking", "tool_use", "tool_result", "image"]) | texts},
        optional={
            **dict.fromkeys(("text", "thinking", "id", "name", "tool_use_id"), texts | anything),
            "input": st.dictionaries(texts, anything, max_size=2),
            "content": texts
            | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts}), max_size=2),
        },
    ),
    max_size=4,
)
roles = st.sampled_from(["user", "assistant", "system", "developer", "tool"]) | texts
formats = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "json_object", "json_schema"]) | texts}, optional={"schema": anything}
)
turns = st.lists(st.fixed_dictionaries({"role": roles, "content": contents}), max_size=5)
messages = {
    "messages": turns | anything,
    "system": contents | anything,
    "stop_sequences": st.lists(texts, max_size=6),
    "thinking": st.fixed_dictionaries({"type": st.sampled_from(["enabled", "disabled"])}) | anything,
    "output_config": st.fixed_dictionaries({}, optional={"format": formats, "effort": texts}) | anything,
    "tools": tools | st.lists(anything, max_size=1),
    "tool_choice": choices,
}
kinds_of_items = st.sampled_from(["message", "function_call", "function_call_output", "reasoning"]) | texts
items = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "type": kinds_of_items,
            "role": roles,
            **dict.fromkeys(("content", "output", "summary"), contents | anything),
            **dict.fromkeys(("call_id", "name", "arguments"), texts),
        },
    ),
    max_size=5,
)
responses = {
    "input": texts | turns | items | anything,
    "instructions": texts,
    "max_output_tokens": counts,
    "text": st.fixed_dictionaries({}, optional={"format": formats, "verbosity": texts}) | anything,
    "reasoning": st.fixed_dictionaries({}, optional={"effort": texts}) | anything,
    "include": st.lists(texts, max_size=2),
    "store": st.booleans(),
    "previous_response_id": texts,
    "tools": tools | st.lists(anything, max_size=1),
    "tool_choice": choices,
    "parallel_tool_calls": st.booleans(),
}


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """(path, body): fields mostly of their types, a few with any value at all."""
    kinds: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "/v1/completions": ({"prompt": prompts}, {**sampling, **completion}),
        "/v1/chat/completions": ({}, {**sampling, **chat}),
        "/v1/messages": ({}, {**sampling, **messages}),
        "/v1/messages/count_tokens": ({}, messages),
        "/v1/responses": ({}, {**sampling, **responses}),
        "/tokenize": ({}, {"prompt": texts, "return_token_strs": st.booleans()}),
        "/detokenize": ({}, {"tokens": st.lists(ids, max_size=70)}),
    }
    path = draw(st.sampled_from(["/v1/completions", *kinds]))
    always, maybe = kinds[path]
    fields = draw(st.fixed_dictionaries(always, optional=maybe))
    if fields and draw(st.integers(0, 4)) == 0:
        fields[draw(st.sampled_from(sorted(fields)))] = draw(anything)
    if draw(st.integers(0, 4)) == 0:
        fields |= draw(st.dictionaries(texts, anything, max_size=3))
    return path, json.dumps(fields).encode()


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, bytes]:
    """A body with some of its bytes changed, or bytes that were never one."""
    path, content = draw(bodies())
    raw = bytearray(content)
    for _ in range(draw(st.integers(0, 4))):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return path, draw(st.sampled_from([bytes(raw), draw(st.binary(max_size=200))]))


EXAMPLES = int(os.environ.get("PPSERVE_FUZZ_EXAMPLES", "200"))
several = settings(max_examples=max(1, EXAMPLES // 10), suppress_health_check=list(HealthCheck))
CANARY = b'{"prompt": "canary", "seed": 1}'

# The headers that we read.
WORDS = ("", "0", "-1", "1e9", "nan", "0.5", "1_0", "Bearer ", "Bearer x", "00-0af7651916cd43dd8448eb211c80319c")
NAMES = ("authorization", "x-request-id", "traceparent", "x-request-timeout")
headers = st.dictionaries(
    st.sampled_from(NAMES),
    st.sampled_from(WORDS) | st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=60),
)
strange = st.tuples(bodies() | damaged(), headers)


def ask_all(port: int, asked: Sequence[tuple[tuple[str, bytes], dict[str, str]]]) -> list[int]:
    """The statuses, all over one connection, with a canary after every tenth."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    statuses: list[int] = []
    songs = set()
    for number, ((path, body), named) in enumerate(asked):
        connection.request("POST", path, body, named)
        answer = connection.getresponse()
        content = answer.read()
        assert b"internal error" not in content, (path, body, named)
        assert answer.getheader("x-request-id"), (path, body, named)
        assert answer.status < 300 or json.loads(content)["error"]["message"], (path, body, named)
        statuses.append(answer.status)
        if number % 10 == 0:
            songs.add(song(port))
    connection.close()
    songs.add(song(port))
    assert len(songs) == 1
    return statuses


def song(port: int) -> bytes:
    """The canary's, on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", "/v1/completions", CANARY)
    content = connection.getresponse().read()
    connection.close()
    assert b'"choices"' in content, content
    return content.partition(b'"choices"')[2]


@given(asked=st.lists(strange, min_size=5, max_size=20))
@several
@pytest.mark.slow
async def test_strange_bodies_and_headers(
    served: Served, asked: list[tuple[tuple[str, bytes], dict[str, str]]]
) -> None:
    statuses = await asyncio.to_thread(ask_all, served.port, asked)
    # A time limit that is drawn may pass.
    assert all(200 <= status < 300 or 400 <= status < 500 or status == 504 for status in statuses)
