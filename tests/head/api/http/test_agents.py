"""Coding agents' sessions, replayed: the second request has what the first one brought, as the agent gives it
back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ppserve.head.api.http.bodies import to_body
from ppserve.head.api.http.openai_responses import ResponsesBody
from ppserve.head.limits import Limits
from tests.agents import RESULT, TASK, Recorded, claude_answers, claude_code, codex, codex_answers
from tests.fake_engine import CARD, FakeEngine
from tests.head.api.http.asking import TOOL_TEMPLATE, Answer, Served, served_http
from tests.head.api.http.test_message_tools import joined
from tests.head.api.http.test_response_tools import rebuilt

CALL = '<tool_call>{{"name": "{name}", "arguments": {{"{key}": "ls -l"}}}}</tool_call>'
SAID = "<think>Hm.</think>\nI look.\n" + CALL


async def replay(served: Served, recorded: Recorded) -> Answer:
    headers = {name.replace("-", "_"): value for name, value in recorded.headers.items()}
    answer = await served.ask(recorded.path, recorded.body, **headers)
    assert answer.status == 200, answer.body
    return answer


def prompt(served: Served) -> str:
    """The prompt of the last request."""
    return served.handler.tokenizer.decode(list(served.engine.requests[-1].prompt_ids))


async def test_claude_code(tool_served: Served) -> None:
    tool_served.engine.said = SAID.format(name="Bash", key="command").encode()
    first = await replay(tool_served, claude_code([], 1, 100, "fake"))
    begun = prompt(tool_served)
    content = joined(first.named_events)
    assert [block["type"] for block in content] == ["thinking", "text", "tool_use"]
    assert first.headers["x-ignored-fields"] == "metadata, context_management"
    await replay(tool_served, claude_code(claude_answers(content), 2, 100, "fake"))
    continued = prompt(tool_served)
    assert continued.startswith(begun)
    assert "billing" not in continued
    told = "assistant:I look.\n" + CALL.format(name="Bash", key="command") + f"tool:{RESULT}"
    assert continued.removeprefix(begun).strip() == told
    assert [begun.count(text) for text in (TASK, '"Bash"', '"TodoWrite"', "Rule 1.")] == [1] * 4


async def test_codex(tool_served: Served) -> None:
    tool_served.engine.said = SAID.format(name="mcp__harbour__lamps", key="quay").encode()
    first = await replay(tool_served, codex([], 1, 100, "fake"))
    begun = prompt(tool_served)
    output = rebuilt([event for _, event in first.named_events])
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    assert (output[-1]["name"], output[-1]["namespace"]) == ("lamps", "mcp__harbour")
    ignored = "prompt_cache_key, client_metadata, tools.custom, tools.web_search"
    assert first.headers["x-ignored-fields"] == ignored
    history = codex_answers(output)
    await replay(tool_served, codex(history, 2, 100, "fake"))
    continued = prompt(tool_served)
    told = "assistant:I look.\n" + CALL.format(name="mcp__harbour__lamps", key="quay") + f"tool:{RESULT}"
    assert continued == f"{begun}{told}\n"
    assert [begun.count(text) for text in (TASK, '"exec_command"', "Rule 1.")] == [1] * 3
    body = to_body(codex(history, 2, 100, "fake").body, ResponsesBody)
    assert body.prompts[0].messages[-2].shown["reasoning_content"] == "Hm."


@pytest.mark.parametrize(("limits", "status"), [(Limits().within(200_000), 200), (Limits(), 413)])
async def test_what_a_model_can_hold_is_not_refused_for_its_length(
    tmp_path: Path, limits: Limits, status: int
) -> None:
    """Neither the text of a long session nor its JSON, which is longer."""
    path = tmp_path / "tools.jinja"
    path.write_text(TOOL_TEMPLATE)
    recorded = codex([{"role": "user", "content": "\x01" * 190_000}], 1, 10, "fake")
    assert len(json.dumps(recorded.body)) > 1 << 20
    card = replace(CARD, max_context=200_000, limits=limits)
    async with served_http(FakeEngine(card, said=b"Yes."), chat_template=path) as served:
        assert (await served.ask(recorded.path, recorded.body)).status == status
    assert limits.max_message_bytes > limits.max_prompt_bytes >= 128 << 10


def test_short_models_have_the_limits_that_they_had() -> None:
    limits = Limits()
    assert limits.within(4096) == limits
    assert (limits.max_message_bytes, limits.max_body_bytes) == (512 << 10, 1 << 20)
    assert (limits.within(131_072).max_prompt_bytes, limits.within(131_072).max_body_bytes) == (1 << 20, 4 << 20)
