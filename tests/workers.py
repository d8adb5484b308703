"""Which worker of pytest-xdist runs which test, under `--dist loadgroup`.

A file's tests run in one worker, for the sake of its fixtures, and so do all tests that use the shared server.
Tests marked `any_worker` run wherever one is free.
xdist's own groups do nothing with pytest 9.2: xdist appends their names to `Item._nodeid`, which is no more.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).resolve().parent.parent
SHARED = "shared_server"
"""A fixture. Files that name it are one group."""
ANYWHERE = "pytest.mark.any_worker"
"""Each test of a file that has this mark is a group."""


@cache
def _text_of(file: str) -> str:
    return (ROOT / file).read_text()


def group_of(nodeid: str) -> str:
    """Tests of one group run in one worker."""
    file = nodeid.partition("::")[0]
    if SHARED in _text_of(file):
        return SHARED
    return nodeid if ANYWHERE in _text_of(file) else file


class GroupScheduling(LoadScopeScheduling):
    """xdist asks for the scope of a test, and gives a worker whole scopes."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling | None:
    return GroupScheduling(config, log) if config.getoption("dist") == "loadgroup" else None
