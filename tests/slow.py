"""Which tests are slow: those that start servers or ranks, or compute for more than half a second.

A test is slow when it lies in tests/e2e, uses the server that all tests share (`shared_server`), or says so with
`pytest.mark.slow`; `make test-fast` leaves slow tests out. Where many parameters show one thing, `quick_first`
marks all but the first. What starts processes that import torch refuses to do so in any other test. Other marks
that were forgotten are named at the end of `make test-fast`, by CPU time, which depends little on what else the
machine does. Being named is no failure.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

marked: set[str] = set()
"""The ids of slow tests, known once tests are collected."""

_SLOW_S = 1.0
"""Twice the half second that makes a test slow: processors differ."""

_cpu_s: dict[str, float] = defaultdict(float)
"""What each test that is not marked slow has used, with its processes."""


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


def _spent_s() -> float:
    return sum(os.times()[:4])


class NamesForgottenMarks:
    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        before_s = _spent_s()
        try:
            return (yield)
        finally:
            item.user_properties.append(("cpu_s", _spent_s() - before_s))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            _cpu_s[report.nodeid] = dict(report.user_properties).get("cpu_s", 0.0)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        slow = sorted((spent, name) for name, spent in _cpu_s.items() if spent > _SLOW_S)
        if slow:
            terminalreporter.section("not marked slow, with warm kernels they should be (seconds of CPU time)")
        for spent, name in reversed(slow):
            terminalreporter.write_line(f"{spent:5.1f}  {name}")
