"""What /openapi.json says is what the server takes: paths, fields, ranges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ppserve.head.api.http.anthropic_body import MessagesBody
from ppserve.head.api.http.bodies import CompletionBody, GenerationBody
from ppserve.head.api.http.chat import ChatBody
from ppserve.head.api.http.openai_responses import ResponsesBody
from ppserve.head.api.http.server import PATHS
from ppserve.head.options import NAMES, RANGES
from tests.fake_engine import KEYS
from tests.head.api.http.asking import Served, served_http

PROMPTS: dict[type[GenerationBody], dict[str, Any]] = {
    CompletionBody: {"prompt": "a"},
    ChatBody: {"messages": [{"role": "user", "content": "a"}]},
    MessagesBody: {"messages": [{"role": "user", "content": "a"}]},
    ResponsesBody: {"input": "a"},
}


async def described(served: Served, **headers: str) -> Any:
    answer = await served.ask("/openapi.json", **headers)
    assert answer.status == 200, answer.body
    return answer.json


def fields_of(document: Any, kind: type[GenerationBody]) -> dict[str, Any]:
    fields: dict[str, Any] = document["components"]["schemas"][kind.__name__]["properties"]
    return fields


async def test_every_path_is_described_and_every_described_path_is_served(served: Served) -> None:
    document = await described(served)
    told = {(method.upper(), path) for path, of_path in document["paths"].items() for method in of_path}
    own = {(each.method, each.path.replace(":path", "")) for each in PATHS}
    assert told == own | {("GET", "/openapi.json")}
    for method, path in told:
        answer = await served.ask(path.replace("{name}", "nobody"), {} if method == "POST" else None, method)
        assert "there is no path" not in answer.body.decode(), (method, path)
        assert answer.status != 405, (method, path)


@pytest.mark.parametrize("kind", PROMPTS)
async def test_every_field_is_described_and_none_else_is_taken(served: Served, kind: type[GenerationBody]) -> None:
    fields = fields_of(await described(served), kind)
    assert set(fields) == {*kind.__struct_encode_fields__} - {""}
    path = next(each.path for each in PATHS if each.body is kind)
    known = await served.ask(path, {**PROMPTS[kind], **dict.fromkeys(fields.keys() - PROMPTS[kind])})
    assert "x-ignored-fields" not in known.headers
    unknown = await served.ask(path, {**PROMPTS[kind], "no_such_field": 1})
    assert unknown.headers["x-ignored-fields"] == "no_such_field"


@pytest.mark.parametrize("kind", PROMPTS)
async def test_what_lies_within_a_range_is_taken_and_what_lies_outside_is_not(
    served: Served, kind: type[GenerationBody]
) -> None:
    fields = fields_of(await described(served), kind)
    path = next(each.path for each in PATHS if each.body is kind)
    ranges = {name: field for name, field in fields.items() if "maximum" in field}
    own = dict(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))
    assert {"temperature", "top_p", "top_k", "seed", own["max_tokens"]} <= set(ranges)
    assert len(ranges) == len(set(RANGES) & set(kind.__struct_fields__))
    for name, field in ranges.items():
        for value in (field["minimum"], field["maximum"]):
            most = value if name == "min_tokens" else 1
            bounded = {**PROMPTS[kind], own["max_tokens"]: most, "stream": True, name: value}
            answer = await served.ask(path, bounded)
            assert answer.status == 200, (name, answer.body)
        for value in (field["minimum"] - 1, field["maximum"] * 2 + 1):
            answer = await served.ask(path, {**PROMPTS[kind], "stream": True, name: value})
            assert (answer.status, answer.json["error"]["message"].partition(":")[0]) == (400, name)


async def test_options_carry_their_meanings(served: Served) -> None:
    document = await described(served)
    for kind in PROMPTS:
        fields = fields_of(document, kind)
        names = dict(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))
        options = [names[name] for name in NAMES if name in names]
        assert len(options) > 14
        assert all(fields[name]["description"].endswith(".") for name in options)


async def test_with_keys_it_says_so_and_wants_one(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEYS)
    async with served_http(api_key_file=tmp_path / "keys") as served:
        assert (await served.ask("/openapi.json")).status == 401
        document = await described(served, authorization="Bearer 0123456789abcdef")
    open_paths = {path for path, of in document["paths"].items() for each in of.values() if "security" not in each}
    assert open_paths == {each.path for each in PATHS if each.is_open} == {"/health"}
