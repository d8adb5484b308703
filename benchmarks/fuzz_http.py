"""Strange HTTP requests for a server of its own: tests/head/api/http/test_fuzz.py with many more of them.

    python benchmarks/fuzz_http.py [--count 10000] [--serve "--stages 2"]

`--count` structured bodies, then twice as many damaged and random ones. Only 2xx and 4xx are answered, without the
words "internal error". Between them the same question is asked, whose answer must stay the same.
"""

from __future__ import annotations

import http.client
import json
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
from local_server import running

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests are no package of the environment

from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

from tests.head.api.http.strange_bodies import bodies, damaged

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
QUESTION = json.dumps({"prompt": "Once upon a time", "seed": 1, "max_tokens": 8}).encode()
CALLERS = 16


def collect(strategy: SearchStrategy[Any], count: int) -> list[Any]:
    """So many examples."""
    found: list[Any] = []

    @settings(max_examples=count, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def note(example: Any) -> None:
        found.append(example)

    note()
    return found[:count]


def post(connection: http.client.HTTPConnection, path: str, body: bytes) -> tuple[int, bytes]:
    connection.request("POST", path, body)
    answer = connection.getresponse()
    return answer.status, answer.read()


def send_all(address: str, asked: Sequence[tuple[str, bytes]]) -> Counter[int]:
    """The statuses of these requests, over one connection."""
    connection = http.client.HTTPConnection(address, timeout=120)
    expected = json.loads(post(connection, "/v1/completions", QUESTION)[1])["choices"]
    statuses: Counter[int] = Counter()
    for number, (path, body) in enumerate(asked):
        status, content = post(connection, path, body)
        assert status < 300 or 400 <= status < 500, (path, body, status)
        assert b"internal error" not in content.lower(), (path, body, content)
        statuses[status] += 1
        if number % 50 == 0:
            assert json.loads(post(connection, "/v1/completions", QUESTION)[1])["choices"] == expected
    connection.close()
    return statuses


@click.command(help=__doc__)
@click.option("--count", default=10_000)
@click.option("--serve", "flags", default="--stages 2 --dtype float32")
def main(count: int, flags: str) -> None:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(CALLERS) as pool:
        template = Path(folder) / "chat.jinja"
        template.write_text(TEMPLATE)
        with running([*shlex.split(flags), "--chat-template", str(template)]) as server:
            for name, strategy, number in (("structured", bodies(), count), ("damaged", damaged(), 2 * count)):
                asked = collect(strategy, number)
                parts = [pool.submit(send_all, server.http, asked[k::CALLERS]) for k in range(CALLERS)]
                statuses = sum((part.result() for part in parts), Counter[int]())
                print(f"{len(asked)} {name}: {dict(sorted(statuses.items()))}", flush=True)


if __name__ == "__main__":
    main()
