"""Strange bodies get 2xx or 4xx, and harm nobody else."""

from __future__ import annotations

import asyncio
import http.client
import os
from collections.abc import Sequence
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.head.api.http.asking import served_http
from tests.head.api.http.strange_bodies import bodies, damaged

EXAMPLES = int(os.environ.get("PPSERVE_FUZZ_EXAMPLES", "200"))
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
# Each example is a server of its own: shrinking one that fails would take minutes.
served_each = settings(
    max_examples=max(1, EXAMPLES // 10), deadline=None, suppress_health_check=list(HealthCheck),
    phases=[Phase.reuse, Phase.generate],
)  # fmt: skip
CANARY = b'{"prompt": "canary", "seed": 1}'


def ask_all(port: int, asked: Sequence[tuple[str, bytes]]) -> list[int]:
    """The statuses, all over one connection, with a canary after every tenth."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    statuses: list[int] = []
    songs = set()
    for number, (path, body) in enumerate(asked):
        connection.request("POST", path, body)
        answer = connection.getresponse()
        content = answer.read()
        assert b"internal error" not in content, (path, body)
        statuses.append(answer.status)
        if number % 10 == 0:
            connection.request("POST", "/v1/completions", CANARY)
            songs.add(connection.getresponse().read().partition(b'"choices"')[2])
    connection.close()
    assert len(songs) == 1
    return statuses


def statuses_of(asked: Sequence[tuple[str, bytes]], template: Path) -> list[int]:
    async def main() -> list[int]:
        async with served_http(chat_template=template) as served:
            return await asyncio.to_thread(ask_all, served.port, asked)

    return asyncio.run(main())


def is_fine(status: int) -> bool:
    return 200 <= status < 300 or 400 <= status < 500


@given(asked=st.lists(bodies(), min_size=5, max_size=20))
@served_each
def test_strange_bodies(tmp_path_factory: object, asked: list[tuple[str, bytes]]) -> None:
    assert all(map(is_fine, statuses_of(asked, _template(tmp_path_factory))))


@given(asked=st.lists(damaged(), min_size=5, max_size=20))
@served_each
def test_bytes_that_may_be_no_body(tmp_path_factory: object, asked: list[tuple[str, bytes]]) -> None:
    assert all(map(is_fine, statuses_of(asked, _template(tmp_path_factory))))


def test_the_fuzz_sees_both_outcomes(tmp_path: Path) -> None:
    """The control: strange bodies are neither all refused nor all accepted."""
    collected: list[tuple[str, bytes]] = []

    @settings(max_examples=200, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(bodies())
    def collect(body: tuple[str, bytes]) -> None:
        collected.append(body)

    collect()
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    statuses = statuses_of(collected, template)
    assert {200, 400} <= set(statuses)


@given(asked=st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=10))
@served_each
def test_bytes_that_are_no_http(asked: list[bytes]) -> None:
    async def main() -> None:
        async with served_http() as served:
            for raw in asked:
                reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
                writer.write(raw + b"\r\n\r\n")
                writer.write_eof()
                answer = await reader.read()
                assert not answer or is_fine(int(answer.split(b" ")[1])), (raw, answer)
                writer.close()
            assert (await served.ask("/health")).status == 200

    asyncio.run(main())


def _template(factory: object) -> Path:
    path = Path(factory.getbasetemp()) / "chat.jinja"  # type: ignore[attr-defined]
    path.write_text(TEMPLATE)
    return path
