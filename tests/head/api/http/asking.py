"""A real HTTP server in the test's event loop, with the fake engine, and a client that sees bytes."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from ppserve.config import ServerSettings
from ppserve.head.api.http.page import PageState
from ppserve.head.api.http.server import MAX_CONNECTIONS, HttpServer
from ppserve.head.api.request_handler import RequestHandler
from ppserve.head.api.tls import read_certificates
from tests.fake_engine import CARD, FakeEngine, handler_of

TEMPLATE = """\
{% for message in messages %}
{% if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}
{% if message.role != 'critic' %}{{ message.role[0] }}{% endif %}:{{ message.content }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}a:{% endif %}"""

TOOL_TEMPLATE = """\
{% for tool in tools or [] %}{{ tool | tojson }}{{ eos_token }}{% endfor %}
{% for m in messages %}{{ m.role }}:{{ m.content }}
{% for call in m.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments": {{
 call.function.arguments | tojson }}}</tool_call>{% endfor %}
{% endfor %}
{% if thinks %}{{ "<think>" }}{% endif %}{# It knows </think>. #}"""
"""A template that shows tools, and whose calls and reasoning are those of Hermes and Qwen."""
ANSWER = (
    '<think>Hm.</think>\nI look.\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "time"}\n</tool_call>'
)
"""What a model says that thinks, talks and calls two tools."""
ROOMY = replace(CARD, max_context=4096)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """What the server-sent events hold; the stream's end is checked."""
        assert self.headers["content-type"].startswith("text/event-stream")
        parts = self.body.decode().split("\n\n")
        assert parts[-2:] == ["data: [DONE]", ""]
        assert all(part.startswith("data: {") for part in parts[:-2])
        return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]

    @property
    def named_events(self) -> list[tuple[str, Any]]:
        """What the events of messages and responses hold, with their names, which are also their types."""
        assert self.headers["content-type"].startswith("text/event-stream")
        *parts, end = self.body.decode().split("\n\n")
        lines = [part.split("\n") for part in parts]
        assert end == ""
        assert all(name.startswith("event: ") and data.startswith("data: {") for name, data in lines)
        events = [(name[7:], json.loads(data[6:])) for name, data in lines]
        assert all(name == data["type"] for name, data in events)
        return events


@dataclass
class Served:
    """A running server."""

    engine: FakeEngine
    handler: RequestHandler
    port: int
    counted: Counter[tuple[str, int]]
    """Answers, by path and status."""

    async def ask(self, path: str, body: object = None, method: str = "", **headers: str) -> Answer:
        """One request on a connection of its own. body: bytes as they are, anything else as JSON; None for GET."""
        content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        method = method or ("GET" if body is None else "POST")
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await asyncio.to_thread(self._ask, method, path, content, named)

    def _ask(self, method: str, path: str, content: bytes | None, headers: dict[str, str]) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, content, headers)
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    async def complete(self, **body: object) -> Any:
        """The JSON of an answer that must be 200."""
        answer = await self.ask("/v1/completions", body)
        assert answer.status == 200, answer.body
        return answer.json

    async def stream(self, **body: object) -> list[Any]:
        """The events of a streamed answer."""
        answer = await self.ask("/v1/completions", {**body, "stream": True})
        assert answer.status == 200, answer.body
        return answer.events

    async def refusal(self, path: str = "/v1/completions", /, **body: object) -> tuple[int, str | None, str]:
        """(status, param, message) of an answer that must be an error."""
        answer = await self.ask(path, body)
        error = answer.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return answer.status, error["param"], error["message"]


@asynccontextmanager
async def served_http(
    engine: FakeEngine | None = None,
    max_connections: int = MAX_CONNECTIONS,
    page: PageState | None = None,
    **settings: Any,
) -> AsyncIterator[Served]:
    """A server on a free port that says that it is healthy."""
    engine = engine or FakeEngine()
    parsed = ServerSettings(http_port=0, **settings)
    counted: Counter[tuple[str, int]] = Counter()
    handler = handler_of(engine, parsed)
    handler.set_serving(True)
    certificates, origins = read_certificates(parsed), parsed.cors_origin

    def count(path: str, status: int) -> None:
        counted[path, status] += 1

    server = HttpServer(handler, count, certificates, origins, max_connections, page)
    port = await server.start(parsed.host, parsed.http_port)
    try:
        yield Served(engine, handler, port, counted)
    finally:
        await handler.drain(0)
        await server.stop()
        handler.close()


def raw(path: str, body: object, *headers: str) -> bytes:
    """A request as bytes."""
    content = json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "host: here", f"content-length: {len(content)}", *headers]
    return "\r\n".join([*head, "", ""]).encode() + content
