"""Which tests are slow: those that start servers or ranks, or compute for more than half a second.

A test is slow when it lies in tests/e2e, uses the server that all tests share (`shared_server`), or says so with
`pytest.mark.slow`; `make test-fast` leaves slow tests out. Where many parameters show one thing, `quick_first`
marks all but the first. What starts processes that import torch refuses to do so in any other test.

Tests marked `thorough` are slow, and show a second time what another one shows: `make test-all` alone runs them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

marked: set[str] = set()
"""The ids of slow tests, known once tests are collected."""


def require_slow_test(what: str) -> None:
    """Fails a test that is not marked slow. Outside of pytest, nothing."""
    current = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    assert not current or current in marked, f"{what} takes seconds: mark {current} with pytest.mark.slow"


def quick_first(values: Iterable[Any], number: int = 1) -> list[Any]:
    """Values of a parameter, of which the tests of all but the first are slow."""
    return [
        value if place < number else pytest.param(value, marks=pytest.mark.slow)
        for place, value in enumerate(values)
    ]


def thorough(*values: Any) -> list[Any]:
    """Values of a parameter whose tests `make test-all` alone runs."""
    return [pytest.param(value, marks=(pytest.mark.slow, pytest.mark.thorough)) for value in values]
