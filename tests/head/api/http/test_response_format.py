"""The form of an answer in OpenAI's and vLLM's words: which form reaches the engine, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from ppserve.core.scheduling.token_filter import is_allowed
from ppserve.grammar.structured_output import StructuredOutput
from ppserve.head.api.http.bodies import CompletionBody, to_body
from tests.fake_engine import EOS
from tests.head.api.http.asking import Served

SCHEMA = {"type": "object", "properties": {"a": {"const": 1.0}}}
OPENAI = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
DOORS = {"/v1/completions": {"prompt": "hi"}, "/v1/chat/completions": CHAT}

BY_SCHEMA = StructuredOutput("json_schema", json.dumps(SCHEMA, separators=(",", ":")))
ANY_JSON = StructuredOutput("json_schema", "{}")
JSON_OBJECT = StructuredOutput("json_object")
FORMS: list[tuple[dict[str, Any], str, StructuredOutput]] = [
    ({"response_format": OPENAI}, "response_format.json_schema.schema", BY_SCHEMA),
    ({"response_format": {"type": "json_object"}}, "response_format", JSON_OBJECT),
    *(
        ({"structured_outputs": {kind: value}}, f"structured_outputs.{kind}", output)
        for kind, value, output in (
            ("json", SCHEMA, BY_SCHEMA),
            ("json", "{}", ANY_JSON),
            ("json", {}, ANY_JSON),
            ("regex", "a|b", StructuredOutput("regex", "a|b")),
            ("choice", ["a", "é"], StructuredOutput("choice", '["a","é"]')),
            ("grammar", "start: x", StructuredOutput("grammar", "start: x")),
            ("json_object", True, JSON_OBJECT),
        )
    ),
    (
        {"structured_outputs": {"regex": "a", "json": None, "choice": [], "disable_fallback": False}},
        "structured_outputs.regex",
        StructuredOutput("regex", "a"),
    ),
    ({"guided_json": SCHEMA}, "guided_json", BY_SCHEMA),
    ({"guided_json": True}, "guided_json", StructuredOutput("json_schema", "true")),
    ({"guided_regex": "a"}, "guided_regex", StructuredOutput("regex", "a")),
    ({"guided_choice": ["a"]}, "guided_choice", StructuredOutput("choice", '["a"]')),
    ({"guided_grammar": "root ::= x"}, "guided_grammar", StructuredOutput("grammar", "root ::= x")),
]


@pytest.mark.parametrize(("body", "field", "output"), FORMS)
def test_each_word_is_a_form(body: dict[str, Any], field: str, output: StructuredOutput) -> None:
    made = to_body({"prompt": "a", **body}, CompletionBody)
    assert made.options().structured_output == output
    assert made.names["structured_output"] == field


NESTED = {"properties": {"a": {"items": {"not": {}}}}}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    *(
        (body, field, f"{field}: at /properties/a/items/not: the keyword 'not' is not enforced here")
        for field, body in {
            "response_format.json_schema.schema": {
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": NESTED}}
            },
            "structured_outputs.json": {"structured_outputs": {"json": NESTED}},
            "guided_json": {"guided_json": json.dumps(NESTED)},
        }.items()
    ),
    ({"guided_regex": "(a"}, "guided_regex", "a group is not closed"),
    ({"guided_choice": ["a"] * 10_001}, "guided_choice", "the limit is 10000"),
    ({"guided_grammar": "start: %json {}"}, "guided_grammar", "%json is not served in a grammar"),
    ({"guided_json": "{"}, "guided_json", "it is no JSON"),
    ({"guided_json": {"enum": ["x" * (1 << 18)]}}, "guided_json", "the limit is 262144"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "'xml' is not served"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type", "'structural_tag' is not served"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "missing"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema", "no field is"),
    ({"response_format": 5}, "response_format", "must be an object, not a whole number"),
    ({"guided_choice": [5]}, "guided_choice[0]", "must be a text, not a whole number"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not served"),
    ({"structured_outputs": {"whitespace_pattern": "x"}}, "structured_outputs.whitespace_pattern", "not served"),
    ({"structured_outputs": {"xml": "x"}}, "structured_outputs.xml", "no field is called so here"),
    (
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        "structured_outputs.regex", "not together with structured_outputs.choice",
    ),
    (
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
        "guided_regex", "not together with response_format",
    ),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "not together with a form"),
    ({"guided_regex": "a", "min_tokens": 1}, "min_tokens", "not together with a form"),
    (
        {"guided_regex": "ab*", "seed": 1, "max_tokens": 9, "resume": {"token_ids": [97, 99]}},
        "resume.token_ids", "token 1 of these does not fit the form of the answer",
    ),
]  # fmt: skip


@pytest.mark.parametrize("path", DOORS)
async def test_what_is_refused_names_its_field_and_place(served: Served, path: str) -> None:
    for body, field, problem in REFUSED:
        status, named, message = await served.refusal(path, **DOORS[path], **body)
        assert status == 400, body
        assert named == field, message
        assert problem in message, message
    assert served.engine.requests == []


@pytest.mark.parametrize("path", DOORS)
async def test_the_filter_goes_with_the_request(served: Served, path: str) -> None:
    """Each request has its own, and one without a form none."""
    body = {**DOORS[path], "max_tokens": 2}
    for form in ({"guided_choice": ["a", "b"]}, {"structured_outputs": {"regex": "[ab]"}}, {}):
        assert (await served.ask(path, {**body, **form})).status == 200
    first, second, none = served.engine.filters
    assert none is None
    for each in (first, second):
        assert each is not None
        assert [i for i in range(257) if is_allowed(each.allowed([]), i)] == [*b"ab"]
        assert [i for i in range(257) if is_allowed(each.allowed([*b"a"]), i)] == [EOS]
    assert first is not second


@pytest.fixture
def held(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.Event]:
    """Compiling waits for the test."""
    released = asyncio.Event()
    grammars = served.handler._forms._grammars
    compiled = grammars.compiled

    async def waiting(output: StructuredOutput) -> Any:
        await released.wait()
        return await compiled(output)

    monkeypatch.setattr(grammars, "compiled", waiting)
    yield released
    released.set()


async def test_a_caller_waits_for_compiling_no_longer_than_its_time(served: Served, held: asyncio.Event) -> None:
    answer = await served.ask("/v1/completions", {"prompt": "a", "guided_regex": "late"}, x_request_timeout="0.2")
    assert (answer.status, answer.json["error"]["code"]) == (504, "deadline_exceeded")
    assert served.engine.requests == []
    held.set()
    assert (await served.ask("/v1/completions", {"prompt": "a", "guided_regex": "late"})).status == 200


async def test_others_are_served_while_a_form_is_compiled(served: Served, held: asyncio.Event) -> None:
    late = asyncio.create_task(served.ask("/v1/completions", {"prompt": "a", "guided_regex": "slow"}))
    assert (await served.ask("/v1/completions", {"prompt": "a"})).status == 200
    assert not late.done()
    held.set()
    assert (await late).status == 200
