"""What coding agents send, by the public shapes of their requests; every text is ours.

`claude_code` speaks /v1/messages and `codex` /v1/responses, each as a conversation: a request, and the next one,
which has what came back as that agent gives it back.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

TASK = "Why does the harbour test fail? Mend it."
RESULT = "test_harbour.py:7: AssertionError: 2 boats, 3 lamps"
EPHEMERAL = {"type": "ephemeral", "ttl": "1h"}
RULES = (
    "A lamp is lit before a boat leaves. A boat without a lamp waits at the quay. Each quay has a keeper, who "
    "writes down who came and who went. Nobody moves a lamp that another one has lit. "
)


def instructions(num_words: int) -> str:
    """A system prompt of so many words at least, of which no two paragraphs are equal."""
    per_rule = len(RULES.split()) + 2
    return "\n".join(f"Rule {number}. {RULES}" for number in range(num_words // per_rule + 1))


@dataclass(frozen=True)
class Recorded:
    """A request as it goes over the wire."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


def _object(**properties: Any) -> dict[str, Any]:
    """The schema of a tool's arguments, of which the first is required."""
    return {
        "type": "object",
        "properties": properties,
        "required": [next(iter(properties))],
        "additionalProperties": False,
    }


def _tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **_object(**properties)}
    return {"name": name, "description": description, "input_schema": schema}


CLAUDE_TOOLS = [
    _tool(
        "Bash",
        "Runs a command in a shell that lives as long as the session.",
        command={"type": "string", "description": "The command."},
        timeout={"type": "number", "description": "In milliseconds."},
        run_in_background={"type": "boolean"},
    ),
    _tool("Read", "Reads a file.", file_path={"type": "string"}, offset={"type": "integer", "minimum": 0}),
    _tool(
        "Edit",
        "Replaces a text in a file.",
        file_path={"type": "string"},
        old_string={"type": "string"},
        new_string={"type": "string"},
        replace_all={"type": "boolean", "default": False},
    ),
    _tool(
        "TodoWrite",
        "Keeps the list of what is to be done.",
        todos={
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "content": {"type": "string", "minLength": 1},
                    "status": {"type": "string", "enum": ["pending", "in_progress", "completed"]},
                },
                "required": ["content", "status"],
                "additionalProperties": False,
            },
        },
    ),
    _tool("WebFetch", "Reads a page.", url={"type": "string", "format": "uri"}),
]


def claude_code(history: list[dict[str, Any]], request: int, num_words: int, model: str) -> Recorded:
    """The request number `request` of a session. history: the messages behind the first."""
    header = f"x-anthropic-billing-header: cc_version=2.1.{request}; cc_entrypoint=cli; cch={request:05x};"
    system = [
        {"type": "text", "text": header},
        {"type": "text", "text": "You help a programmer.", "cache_control": EPHEMERAL},
        {"type": "text", "text": instructions(num_words), "cache_control": EPHEMERAL},
    ]
    reminder = "<system-reminder>\nToday is the day of the lamps.\n</system-reminder>"
    first = [{"type": "text", "text": reminder}, {"type": "text", "text": TASK, "cache_control": EPHEMERAL}]
    body = {
        "model": model,
        "messages": [
            {"role": "user", "content": first},
            {"role": "system", "content": "The tree is clean."},
            *history,
        ],
        "system": system,
        "tools": CLAUDE_TOOLS,
        "metadata": {"user_id": json.dumps({"device_id": "d" * 64, "account_uuid": "", "session_id": "s"})},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
        "x-api-key": "none",
        "x-app": "cli",
        "user-agent": "claude-cli/2.1 (external, cli)",
    }
    return Recorded("/v1/messages?beta=true", headers, body)


def claude_answers(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages that this agent adds when an answer came: that, and the results of its uses."""
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": RESULT, "is_error": True}
        for block in content
        if block["type"] == "tool_use"
    ]
    results[-1]["cache_control"] = EPHEMERAL
    return [{"role": "assistant", "content": content}, {"role": "user", "content": results}]


def _function(name: str, description: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "name": name,
        "description": description,
        "strict": False,
        "parameters": _object(**properties),
    }


CODEX_TOOLS: list[dict[str, Any]] = [
    _function(
        "exec_command",
        "Runs a command in a terminal.",
        cmd={"type": "string"},
        yield_time_ms={"type": "number"},
        max_output_tokens={"type": "number"},
    ),
    _function(
        "update_plan",
        "Keeps the plan.",
        plan={
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"step": {"type": "string"}, "status": {"type": "string"}},
                "required": ["step", "status"],
                "additionalProperties": False,
            },
        },
    ),
    {
        "type": "namespace",
        "name": "mcp__harbour",
        "description": "Tools of the harbour.",
        "tools": [_function("lamps", "Counts the lamps.", quay={"type": "string"})],
    },
    {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": {"type": "grammar"}},
    {"type": "web_search", "external_web_access": False},
]


def codex(history: list[dict[str, Any]], request: int, num_words: int, model: str) -> Recorded:
    """The request number `request` of a session. history: the items behind the first."""

    def said(role: str, text: str) -> dict[str, Any]:
        return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}

    body = {
        "model": model,
        "instructions": instructions(num_words),
        "input": [
            said("developer", "<permissions>Everything within the harbour.</permissions>"),
            said("user", "<environment_context>\n  <cwd>/harbour</cwd>\n</environment_context>"),
            said("user", TASK),
            *history,
        ],
        "tools": CODEX_TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "text": {"verbosity": "low"},
        "client_metadata": {"turn": str(request)},
    }
    headers = {
        "authorization": "Bearer none",
        "accept": "text/event-stream",
        "originator": "codex_cli_rs",
        "session-id": "0199",
        "x-client-request-id": f"turn-{request}",
        "user-agent": "codex_cli_rs/0.140.0",
    }
    return Recorded("/v1/responses", headers, body)


def codex_answers(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that this agent adds when an answer came: without ids and without the text of a reasoning."""
    kept = {
        "message": ("type", "role", "content"),
        "reasoning": ("type", "summary", "encrypted_content"),
        "function_call": ("type", "name", "namespace", "arguments", "call_id"),
    }
    given_back = [{name: item[name] for name in kept[item["type"]] if name in item} for item in output]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": RESULT}
        for item in output
        if item["type"] == "function_call"
    ]
    return [*given_back, *results]
