"""Forced calls of random tools over HTTP: whether all are valid, and whether streams tell what whole answers do.

    python benchmarks/tool_calls.py [--model smollm2] [--calls 2000] [--tools 40] [--format hermes]

Each request offers five of the tools. It asks for one call of any (`required`), for the call of a named one, or
for several calls. It is asked whole and streamed, and one stream in ten is broken off in its middle and resumed.
A call is valid if it names an offered tool and `jsonschema` accepts its arguments. An answer that its length has
cut counts as cut; its complete calls are checked too.
"""

from __future__ import annotations

import http.client
import json
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import jsonschema
from local_server import running

from tests.head.api.answer_parts.random_tools import WORDS, random_tools

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)
CALLERS = 16
MAX_TOKENS = 400


def request_of(number: int, tools: list[dict[str, Any]]) -> dict[str, Any]:
    rng = random.Random(number)
    offered = rng.sample(tools, 5)
    named = {"type": "function", "function": {"name": offered[0]["function"]["name"]}}
    return {
        "messages": [{"role": "user", "content": f"Question {number}: {' '.join(rng.choices(WORDS, k=5))}?"}],
        "tools": offered,
        "tool_choice": named if number % 3 == 0 else "required",
        "parallel_tool_calls": number % 8 == 7,
        "seed": number,
        "max_tokens": MAX_TOKENS,
        "return_token_ids": True,
    }


class Asker:
    """Asks one server, and counts what it finds."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.found: Counter[str] = Counter()

    def ask(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the answer, or the choices of its events. A caller that stops early hangs up."""
        connection = http.client.HTTPConnection(self._address, timeout=600)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body))
            answer = connection.getresponse()
            if answer.status != 200:
                raise SystemExit(f"{answer.status}: {answer.read().decode()}")
            if not body.get("stream"):
                yield json.loads(answer.read())["choices"][0]
                return
            for line in answer:
                if line.startswith(b"data: {"):
                    event = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        raise SystemExit(str(event))
                    yield from event["choices"]
        finally:
            connection.close()

    def check(self, number: int, tools: list[dict[str, Any]]) -> None:
        body = request_of(number, tools)
        (whole,) = self.ask(body)
        self._check_calls(whole, body)
        events = [*self.ask({**body, "stream": True})]
        self.found["streamed otherwise"] += joined(events) != told(whole)
        if number % 10 == 0:
            self._check_resumed(events, whole, body)

    def _check_calls(self, whole: dict[str, Any], body: dict[str, Any]) -> None:
        schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in body["tools"]}
        calls, is_cut = whole["message"].get("tool_calls", []), whole["finish_reason"] == "length"
        self.found["answers"] += 1
        self.found["cut"] += is_cut
        if not is_cut and (whole["finish_reason"], whole["message"]["content"]) != ("tool_calls", None):
            self.found["invalid"] += 1
        for call in calls[: len(calls) - is_cut]:
            self.found["calls"] += 1
            try:
                jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]])
            except (ValueError, KeyError, jsonschema.ValidationError) as error:
                self.found["invalid"] += 1
                print(error)

    def _check_resumed(self, events: list[dict[str, Any]], whole: dict[str, Any], body: dict[str, Any]) -> None:
        """The first half of a stream, and what a resumed one adds to it, are the whole answer."""
        held: list[dict[str, Any]] = []
        for event in self.ask({**body, "stream": True}):
            held.append(event)
            if len(held) > len(events) // 2:
                break
        ids = [token_id for event in held for token_id in event.get("token_ids", ())]
        rest = [*self.ask({**body, "stream": True, "resume": {"index": 0, "token_ids": ids}})]
        self.found["resumed"] += 1
        self.found["resumed otherwise"] += joined(held + rest) != told(whole)


def told(choice: dict[str, Any]) -> Any:
    """What an answer says."""
    message = choice["message"]
    calls = [
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", [])
    ]
    return choice["finish_reason"], message["content"] or "", calls


def joined(events: list[dict[str, Any]]) -> Any:
    """What the events of an answer say together."""
    text, calls, reason = "", dict[int, list[str]](), None
    for event in events:
        delta, reason = event["delta"], event["finish_reason"]
        text += delta.get("content") or ""
        for call in delta.get("tool_calls", []):
            said = calls.setdefault(call["index"], [call.get("id"), call["function"].get("name"), ""])
            said[2] += call["function"]["arguments"]
    return reason, text, [tuple(calls[index]) for index in sorted(calls)]


@click.command(help=__doc__)
@click.option("--model", default="tiny")
@click.option("--calls", default=2000)
@click.option("--tools", default=40)
@click.option("--format", default="hermes")
def main(model: str, calls: int, tools: int, format: str) -> None:
    offered = [tool.for_template() for tool in random_tools(random.Random(tools), tools, format)]
    with tempfile.TemporaryDirectory() as directory:
        template = Path(directory) / "chat.jinja"
        template.write_text(TEMPLATE)
        flags = ["--model", model, "--stages", "2", "--chat-template", str(template), "--tool-format", format]
        with running([*flags, "--force-cpu"]) as address:
            asker = Asker(address.http)
            with ThreadPoolExecutor(CALLERS) as callers:
                for _ in callers.map(lambda number: asker.check(number, offered), range(calls)):
                    pass
    print({name: asker.found[name] for name in sorted(asker.found)})


if __name__ == "__main__":
    main()
