"""docs/library.md is true: its code runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ppserve.library.pipeline import Settings

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "library.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_runs_as_it_stands(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(compile(EXAMPLES[number], f"{PAGE.name}, example {number}", "exec"), names)
    assert len(capsys.readouterr().out.split()) > 10


def test_every_setting_is_in_the_table() -> None:
    rows = re.findall(r"^\| (`.*?) \|", PAGE.read_text(), re.MULTILINE)
    named = {name.strip("`") for row in rows for name in row.split(", ")}
    assert named == set(Settings.__annotations__)
