"""A server with the page, for tests of what serves it and of what it does in a browser."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ppserve.head.api.http.page import PageState
from ppserve.head.observe.live import read_state
from tests.fake_engine import CARD, READING, FakeEngine
from tests.head.api.http.asking import TEMPLATE, Served, served_http

KEY = "0123456789abcdef"
LATENCY = {"bounds_s": [0.1, 1.0], "counts": [0, 0, 0]}
LOAD: dict[str, Any] = {
    **dict.fromkeys(("running", "waiting", "in_flight", "kv_usage", "requests", "prompt_tokens"), 0),
    "generated_tokens": 0,
    "ttft": LATENCY,
    "itl": LATENCY,
}
STEPS = {"mine": [[1, 3]]}
asked_for: list[tuple[str, str]] = []


def steps_of(caller: str, name: str) -> list[list[int]]:
    asked_for.append((caller, name))
    return STEPS.get(name, [[]])


PAGE = PageState(lambda: read_state((READING,), CARD, LOAD, [[]], {"metrics": "http:9"}), steps_of)


@asynccontextmanager
async def with_page(
    tmp_path: Path, engine: FakeEngine | None = None, template: str = TEMPLATE, **settings: Any
) -> AsyncIterator[Served]:
    (tmp_path / "chat.jinja").write_text(template)
    settings = {"chat_template": tmp_path / "chat.jinja", **settings}
    async with served_http(engine, page=PAGE, **settings) as served:
        yield served
