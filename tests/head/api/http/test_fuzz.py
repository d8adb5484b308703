"""Strange requests get 2xx or 4xx, and harm nobody else. benchmarks/fuzz_http.py is the long form."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.head.api.http.asking import served_http
from tests.head.api.http.strange_bodies import bodies, damaged
from tests.head.api.http.strange_heads import heads, statuses_of_head

Example = TypeVar("Example")

EXAMPLES = int(os.environ.get("PPSERVE_FUZZ_EXAMPLES", "200"))
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
# Each example is a server of its own: shrinking one that fails would take minutes.
served_each = settings(
    max_examples=max(1, EXAMPLES // 10), deadline=None, suppress_health_check=list(HealthCheck),
    phases=[Phase.reuse, Phase.generate],
)  # fmt: skip
CANARY = b'{"prompt": "canary", "seed": 1}'


def ask_all(port: int, parsed: Sequence[tuple[str, bytes]]) -> list[int]:
    """The statuses, all over one connection, with a canary after every tenth."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    statuses: list[int] = []
    songs = set()
    for number, (path, body) in enumerate(parsed):
        connection.request("POST", path, body)
        answer = connection.getresponse()
        content = answer.read()
        assert b"internal error" not in content, (path, body)
        assert answer.getheader("x-request-id"), (path, body)
        assert answer.status < 300 or json.loads(content)["error"]["message"], (path, body)
        statuses.append(answer.status)
        if number % 10 == 0:
            songs.add(song(port))
    connection.close()
    songs.add(song(port))
    assert len(songs) == 1
    return statuses


def song(port: int) -> bytes:
    """The canary's, on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", "/v1/completions", CANARY)
    content = connection.getresponse().read()
    connection.close()
    assert b'"choices"' in content, content
    return content.partition(b'"choices"')[2]


def statuses_of(parsed: Sequence[tuple[str, bytes]], template: Path) -> list[int]:
    async def main() -> list[int]:
        async with served_http(chat_template=template) as served:
            return await asyncio.to_thread(ask_all, served.port, parsed)

    return asyncio.run(main())


def is_fine(status: int) -> bool:
    return 200 <= status < 300 or 400 <= status < 500


@given(parsed=st.lists(bodies(), min_size=5, max_size=20))
@served_each
def test_strange_bodies(tmp_path_factory: object, parsed: list[tuple[str, bytes]]) -> None:
    assert all(map(is_fine, statuses_of(parsed, _template(tmp_path_factory))))


@given(parsed=st.lists(damaged(), min_size=5, max_size=20))
@served_each
def test_bytes_that_may_be_no_body(tmp_path_factory: object, parsed: list[tuple[str, bytes]]) -> None:
    assert all(map(is_fine, statuses_of(parsed, _template(tmp_path_factory))))


@pytest.mark.slow
def test_the_fuzz_sees_both_outcomes(tmp_path: Path) -> None:
    """The control: strange bodies are neither all refused nor all accepted."""
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    statuses = statuses_of(collected(bodies(), 200), template)
    assert {200, 400} <= set(statuses)


def collected(strategy: st.SearchStrategy[Example], count: int) -> list[Example]:
    """So many examples, of ten seeds: those of one resemble each other, and change with the constants that
    hypothesis finds in the source."""
    found: list[Example] = []
    for number in range(10):

        @seed(number)
        @settings(
            max_examples=count // 10, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(strategy)
        def collect(example: Example) -> None:
            found.append(example)

        collect()
    return found


@given(parsed=st.lists(heads() | st.binary(min_size=1, max_size=300), min_size=5, max_size=20))
@served_each
def test_strange_heads(caplog: pytest.LogCaptureFixture, parsed: list[bytes]) -> None:
    assert all(map(is_fine, statuses_of_heads(parsed)))
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def statuses_of_heads(parsed: Sequence[bytes], patience_s: float = 0.1) -> list[int]:
    async def main() -> list[int]:
        async with served_http() as served:
            asking = (asyncio.to_thread(statuses_of_head, served.port, raw, patience_s) for raw in parsed)
            before = await asyncio.to_thread(song, served.port)
            said = await asyncio.gather(*asking)
            assert await asyncio.to_thread(song, served.port) == before
            return [status for statuses in said for status in statuses]

    return asyncio.run(main())


@pytest.mark.slow
def test_the_fuzz_of_heads_sees_all_outcomes(caplog: pytest.LogCaptureFixture) -> None:
    """The control: strange heads are answered, refused for what they are, and refused for what they ask."""
    assert {200, 400, 404, 405} <= set(statuses_of_heads(collected(heads(), 300), patience_s=1.0))
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def _template(factory: object) -> Path:
    path = Path(factory.getbasetemp()) / "chat.jinja"  # type: ignore[attr-defined]
    path.write_text(TEMPLATE)
    return path
