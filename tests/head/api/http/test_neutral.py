"""What a client sends by default and asks for nothing is never an error; and the list of what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ppserve.head.api.http.unserved import FORMS, OF_BOTH, OF_CHATS, OF_COMPLETIONS
from tests.head.api.http.asking import Served

ROOT = Path(__file__).parents[4]
DOORS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 2, "seed": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "seed": 1},
}
OF_DOORS = {"/v1/completions": {**OF_BOTH, **OF_COMPLETIONS}, "/v1/chat/completions": {**OF_BOTH, **OF_CHATS}}

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


@pytest.mark.parametrize("path", DOORS)
async def test_what_asks_for_nothing_is_taken_and_changes_nothing(served: Served, path: str) -> None:
    unserved = [
        (name, value) for name, neutral in {**OF_DOORS[path], **FORMS}.items() for value in (None, *neutral)
    ]
    nulls = {name: None for name, _ in NEUTRAL}
    bodies: list[dict[str, Any]] = [{name: value} for name, value in (*NEUTRAL, *unserved)]
    bodies += [nulls, dict(NEUTRAL), {"n": 2, "best_of": 2}]
    for given in bodies:
        answer = await served.ask(path, {**DOORS[path], **given})
        assert answer.status == 200, (given, answer.json)
    await served.ask(path, DOORS[path])
    *others, two, bare = (replace(request, id="") for request in served.engine.requests)
    assert two == replace(bare, num_sequences=2)
    assert [given for given, other in zip(bodies, others, strict=False) if other != bare] == []


@pytest.mark.parametrize("path", DOORS)
async def test_what_asks_for_something_is_refused(served: Served, path: str) -> None:
    """Any field of the table is refused by its name, whatever its type: a 0, which is no false, is refused too."""
    for name, neutral in OF_DOORS[path].items():
        for value in (0, 7, ["x"], {"x": 1}, {} if {} not in neutral else "x"):
            status, named, message = await served.refusal(path, **DOORS[path], **{name: value})
            assert (status, named, message) == (400, name, f"{name}: not served")
    for best_of, n in ((2, 1), (3, 2), (0, 2), (-1, 1)):
        assert (await served.refusal(path, **DOORS[path], best_of=best_of, n=n))[:2] == (400, "best_of")
    assert (await served.refusal(path, **DOORS[path], stream_options={"include_usage": True}))[
        1
    ] == "stream_options"


def test_the_page_has_the_table_of_what_is_refused() -> None:
    page = (
        (ROOT / "docs/http.md")
        .read_text()
        .partition("| refused | by | asks for nothing |")[2]
        .partition("\n\n")[0]
    )
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*) \|$", page, re.MULTILINE)
    tables: dict[str, Mapping[str, Any]] = {"both": OF_BOTH, "completions": OF_COMPLETIONS, "chats": OF_CHATS}
    expected = [
        (name, door, ", ".join(f"`{json.dumps(value)}`" for value in neutral))
        for door, table in tables.items()
        for name, neutral in table.items()
    ]
    assert rows == expected
