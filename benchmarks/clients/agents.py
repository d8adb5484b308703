"""Coding agents' own programs, against a server whose engine says what it is told.

The first answer calls the agent's tool for commands, the second one ends the task. So it is seen that an agent
reads what the door says, runs the tool, and gives back what the door takes; no model has to know how to use tools.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ppserve.core.request import Request
from ppserve.head.limits import Limits
from tests.fake_engine import CARD, FakeEngine
from tests.head.api.http.asking import TOOL_TEMPLATE, served_http

CONTEXT = 400_000
WITHIN_S = 300
TASK, ANSWER = "How many lamps are there?", "There are three lamps."


@dataclass(frozen=True)
class Agent:
    """package: of npm. tool: its tool for commands. prepare: given its home and the server's address, what it
    needs in its environment. command: what follows its program's name."""

    package: str
    program: str
    tool: str
    argument: str
    prepare: Callable[[Path, str], dict[str, str]]
    command: tuple[str, ...]


def _prepare_codex(home: Path, address: str) -> dict[str, str]:
    provider = {"name": "ppserve", "base_url": f"http://{address}/v1", "wire_api": "responses"}
    lines = ['model = "fake"', 'model_provider = "ppserve"', 'approval_policy = "never"']
    lines += ['sandbox_mode = "danger-full-access"', "[model_providers.ppserve]"]
    lines += [f"{name} = {json.dumps(value)}" for name, value in provider.items()]
    (home / "config.toml").write_text("\n".join(lines))
    return {"CODEX_HOME": str(home)}


def _prepare_claude_code(home: Path, address: str) -> dict[str, str]:
    models = dict.fromkeys(("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL"), "fake")
    quiet = dict.fromkeys(("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_TELEMETRY"), "1")
    return {"ANTHROPIC_BASE_URL": f"http://{address}", "ANTHROPIC_AUTH_TOKEN": "none", **models, **quiet}


AGENTS = {
    "codex": Agent(
        *("@openai/codex@0.171.0", "codex", "exec_command", "cmd"),
        _prepare_codex,
        ("exec", "--skip-git-repo-check", TASK),
    ),
    "claude-code": Agent(
        *("@anthropic-ai/claude-code@2.1.332", "claude", "Bash", "command"),
        _prepare_claude_code,
        ("--allowedTools", "Bash", "-p", TASK),
    ),
}


class Told(FakeEngine):
    """An engine whose answers are these, in turn."""

    answers: tuple[str, ...] = ()

    def queue_request(self, request: Request, *rest: Any) -> None:
        self.said = self.answers[min(len(self.requests), len(self.answers) - 1)].encode()
        super().queue_request(request, *rest)


async def use(agent: Agent, programs: Path, folder: Path) -> str:
    """Return what the agent's session showed. programs: a folder with its program."""
    (folder / "tools.jinja").write_text(TOOL_TEMPLATE)
    call = {"name": agent.tool, "arguments": {agent.argument: "echo three-lamps"}}
    engine = Told(replace(CARD, max_context=CONTEXT, limits=Limits().within(CONTEXT)))
    engine.answers = (f"<think>Hm.</think>I look.<tool_call>{json.dumps(call)}</tool_call>", ANSWER)
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    async with served_http(engine, chat_template=folder / "tools.jinja") as served:
        needed = agent.prepare(home, f"127.0.0.1:{served.port}")
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), **needed}
        process = await asyncio.create_subprocess_exec(
            *(str(programs / agent.program), *agent.command), cwd=work, env=environment,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            said, _ = await asyncio.wait_for(process.communicate(), WITHIN_S)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert ANSWER in said.decode(), said
    first, second = (list(request.prompt_ids) for request in engine.requests)
    assert second[: len(first)] == first, "the second prompt does not go on where the first one ended"
    result = bytes(token_id for token_id in second[len(first) :] if token_id < 256).decode()
    assert result.count("three-lamps") >= 2, result
    return (
        f"{agent.package} ran {agent.tool} and ended; its prompt of {len(first)} bytes is the next one's beginning"
    )
