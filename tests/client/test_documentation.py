"""The examples of docs/client.md run as they stand."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fake_engine import CARD, FakeEngine, served_in_thread
from tests.head.api.http.asking import http_in_thread

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "client.md"
EXAMPLES = re.findall(r"(?<! -->\n)```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
TINY = replace(CARD, name="tiny")


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 7


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_runs(number: int) -> None:
    with (
        served_in_thread(FakeEngine(description=TINY)) as target,
        http_in_thread(FakeEngine(description=TINY)) as http,
    ):
        source = EXAMPLES[number].replace("127.0.0.1:50051", target).replace("127.0.0.1:8000", http)
        exec(compile(source, f"{PAGE.name}, example {number}", "exec"), {"__name__": "__main__"})
