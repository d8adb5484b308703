"""What a client sends by default and asks for nothing is never an error; and the list of what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ppserve.head.api.http.anthropic_body import MessagesBody
from ppserve.head.api.http.bodies import Body, CompletionBody
from ppserve.head.api.http.chat import ChatBody
from ppserve.head.api.http.openai_responses import ResponsesBody
from ppserve.head.api.http.unserved import (
    OF_ALL,
    OF_CHATS,
    OF_COMPLETIONS,
    OF_MESSAGES,
    OF_NEWER,
    OF_RESPONSES,
    SERVED,
)
from tests.head.api.http.asking import Served

ROOT = Path(__file__).parents[4]
DOORS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 2, "seed": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "seed": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "seed": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2, "seed": 1},
}
OF_DOORS: dict[str, Mapping[str, Any]] = {
    "/v1/completions": {**OF_ALL, **OF_COMPLETIONS},
    "/v1/chat/completions": {**OF_ALL, **OF_CHATS},
    "/v1/messages": {**OF_ALL, **OF_NEWER, **OF_MESSAGES},
    "/v1/responses": {**OF_ALL, **OF_NEWER, **OF_RESPONSES},
}

NEUTRAL: list[tuple[str, Any]] = [
    *(
        (name, value)
        for name in ("tools", "functions", "stop", "allowed_token_ids", "bad_words")
        for value in ([], "")
    ),
    *((name, {}) for name in ("logit_bias", "stream_options", "structured_outputs", "metadata", "vllm_xargs")),
    ("response_format", {"type": "text"}),
    ("response_format", {}),
    ("structured_outputs", False),
    *(("parallel_tool_calls", value) for value in (True, False)),
    *((name, value) for name in ("tool_choice", "function_call") for value in ("none", "auto", "")),
    *((name, False) for name in ("store", "echo", "stream", "use_beam_search", "ignore_eos", "return_token_ids")),
    ("stream_options", {"include_usage": False}),
    ("n", 1),
    ("best_of", 1),
    ("modalities", ["text"]),
    ("skip_special_tokens", True),
    ("include_stop_str_in_output", False),
    ("service_tier", "auto"),
    ("top_k", -1),
    ("top_k", 0),
    ("top_p", 1.0),
    ("min_p", 0.0),
    *((f"{name}_penalty", 0) for name in ("frequency", "presence")),
    ("repetition_penalty", 1),
    ("min_tokens", 0),
    *((name, "") for name in ("user", "request_id", "model", "guided_json", "suffix", "reasoning_effort")),
    ("chat_template_kwargs", {}),
    ("documents", []),
]

# What clients of the newer doors send by default, or agents in every request.
NEUTRAL_ELSEWHERE: dict[str, list[tuple[str, Any]]] = {
    "/v1/messages": [
        *((name, value) for name in ("system", "stop_sequences", "tools") for value in ([], None)),
        ("system", ""),
        ("tool_choice", {"type": "auto"}),
        ("thinking", {"type": "disabled"}),
        ("output_config", {}),
        ("output_config", {"format": None, "effort": ""}),
        ("metadata", {"user_id": "somebody"}),
        ("service_tier", "auto"),
        ("cache_control", {"type": "ephemeral"}),
        ("context_management", {"edits": []}),
    ],
    "/v1/responses": [
        *((name, "") for name in ("instructions", "previous_response_id", "user")),
        *((name, value) for name in ("include", "tools") for value in ([], None)),
        ("include", ["reasoning.encrypted_content"]),
        *(("store", value) for value in (True, False)),
        *(("tool_choice", value) for value in ("auto", "none")),
        *(("parallel_tool_calls", value) for value in (True, False)),
        *(("text", value) for value in ({}, {"format": {"type": "text"}}, {"verbosity": "low"})),
        ("reasoning", {}),
        *(("reasoning", {"effort": effort, "summary": "auto"}) for effort in (None, "")),
        ("truncation", "disabled"),
        ("top_logprobs", 0),
        ("background", False),
        ("prompt_cache_key", "somebody"),
        ("service_tier", "auto"),
        ("stream_options", {"include_obfuscation": False}),
        ("metadata", {}),
    ],
}


@pytest.mark.parametrize("path", DOORS)
async def test_what_asks_for_nothing_is_taken_and_changes_nothing(served: Served, path: str) -> None:
    unserved = [
        (name, value) for name, neutral in {**OF_DOORS[path], **SERVED}.items() for value in (None, *neutral)
    ]
    neutral = NEUTRAL_ELSEWHERE.get(path, NEUTRAL)
    nulls = {name: None for name, _ in neutral}
    bodies: list[dict[str, Any]] = [{name: value} for name, value in (*neutral, *unserved)]
    for given in (*bodies, nulls, dict(neutral)):
        answer = await served.ask(path, {**DOORS[path], **given})
        assert answer.status == 200, (given, answer.json)
    await served.ask(path, DOORS[path])
    *others, bare = (replace(request, id="") for request in served.engine.requests)
    if path not in NEUTRAL_ELSEWHERE:
        assert (await served.ask(path, {**DOORS[path], "n": 2, "best_of": 2})).status == 200
        assert replace(served.engine.requests[-1], id="") == replace(bare, num_sequences=2)
    assert [given for given, other in zip(bodies, others, strict=False) if other != bare] == []


@pytest.mark.parametrize("path", DOORS)
async def test_what_asks_for_something_is_refused(served: Served, path: str) -> None:
    """Any field of the table is refused by its name, whatever its type: a 0, which is no false, is refused too."""
    for name, neutral in OF_DOORS[path].items():
        for value in (0, 7, ["x"], {"x": 1}, {} if {} not in neutral else "x"):
            if any(type(value) is type(each) and value == each for each in neutral):
                continue
            answer = await served.ask(path, {**DOORS[path], name: value})
            error = answer.json["error"]
            named = error.get("param", name)  # Anthropic's form has no such field
            assert (answer.status, named, error["message"]) == (400, name, f"{name}: not served")
    if path in NEUTRAL_ELSEWHERE:
        return
    for best_of, n in ((2, 3), (0, 2), (-1, 1)):
        assert (await served.refusal(path, **DOORS[path], best_of=best_of, n=n))[:2] == (400, "best_of")
    assert (await served.refusal(path, **DOORS[path], stream_options={"include_usage": True}))[
        1
    ] == "stream_options"


@pytest.mark.parametrize(("path", "kind"), [("/v1/messages", MessagesBody), ("/v1/responses", ResponsesBody)])
def test_no_field_of_chats_that_would_change_an_answer_is_ignored(path: str, kind: type[Body]) -> None:
    of_older = {*CompletionBody.__struct_encode_fields__, *ChatBody.__struct_encode_fields__}
    own = {*kind.__struct_encode_fields__}
    assert of_older - own - OF_DOORS[path].keys() == {"stream_options"}
    assert own & OF_DOORS[path].keys() == set()


def test_the_page_has_the_table_of_what_is_refused() -> None:
    page = (
        (ROOT / "docs/http.md")
        .read_text()
        .partition("| refused | by | asks for nothing |")[2]
        .partition("\n\n")[0]
    )
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*) \|$", page, re.MULTILINE)
    tables: dict[str, Mapping[str, Any]] = {
        "all": OF_ALL,
        "completions": OF_COMPLETIONS,
        "chats": OF_CHATS,
        "messages": OF_MESSAGES,
        "responses": OF_RESPONSES,
    }
    expected = [
        (name, door, ", ".join(f"`{json.dumps(value)}`" for value in neutral))
        for door, table in tables.items()
        for name, neutral in table.items()
    ]
    assert rows == expected
