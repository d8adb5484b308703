"""Strange requests get 2xx or 4xx, and harm nobody else."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
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

# The headers that we read.
WORDS = ("", "0", "-1", "1e9", "nan", "0.5", "1_0", "Bearer ", "Bearer x", "00-0af7651916cd43dd8448eb211c80319c")
NAMES = ("authorization", "x-request-id", "traceparent", "x-request-timeout")
headers = st.dictionaries(
    st.sampled_from(NAMES),
    st.sampled_from(WORDS) | st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=60),
)
strange = st.tuples(bodies() | damaged(), headers)


def ask_all(port: int, asked: Sequence[tuple[tuple[str, bytes], dict[str, str]]]) -> list[int]:
    """The statuses, all over one connection, with a canary after every tenth."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    statuses: list[int] = []
    songs = set()
    for number, ((path, body), named) in enumerate(asked):
        connection.request("POST", path, body, named)
        answer = connection.getresponse()
        content = answer.read()
        assert b"internal error" not in content, (path, body, named)
        assert answer.getheader("x-request-id"), (path, body, named)
        assert answer.status < 300 or json.loads(content)["error"]["message"], (path, body, named)
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


@given(asked=st.lists(strange, min_size=5, max_size=20))
@served_each
def test_strange_bodies_and_headers(
    tmp_path_factory: pytest.TempPathFactory, asked: list[tuple[tuple[str, bytes], dict[str, str]]]
) -> None:
    template = Path(tmp_path_factory.getbasetemp()) / "chat.jinja"
    template.write_text(TEMPLATE)

    async def main() -> list[int]:
        async with served_http(chat_template=template) as served:
            return await asyncio.to_thread(ask_all, served.port, asked)

    # A time limit that is drawn may pass.
    assert all(200 <= status < 300 or 400 <= status < 500 or status == 504 for status in asyncio.run(main()))
