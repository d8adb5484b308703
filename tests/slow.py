"""Which tests are slow: those that start servers or ranks, or compute for many seconds.

A test is slow when it lies in tests/e2e, uses the server that all tests share (`shared_server`), or says so with
`pytest.mark.slow`. What starts processes that import torch refuses to do so in any other test, so a mark cannot be
forgotten; `make test-fast` leaves slow tests out.
"""

from __future__ import annotations

import os

marked: set[str] = set()
"""The ids of slow tests, known once tests are collected."""


def require_slow_test(what: str) -> None:
    """Fails a test that is not marked slow. Outside of pytest, nothing."""
    current = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    assert not current or current in marked, f"{what} takes seconds: mark {current} with pytest.mark.slow"
