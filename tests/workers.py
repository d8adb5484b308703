"""Which worker of pytest-xdist runs which test, under `--dist loadgroup`, and how a run ends whose worker dies.

A file's tests run in one worker, for the sake of its fixtures, and so do all tests that use the shared server.
Tests marked `any_worker` run wherever one is free.
xdist's own groups do nothing with pytest 9.2: xdist appends their names to `Item._nodeid`, which is no more.

A worker that dies ends the run. xdist would give its tests to others, that which ended it too, and wait for ever.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from xdist.scheduler import LoadScopeScheduling

SHARED = "shared_server"
"""A fixture. Files that name it are one group."""
ANYWHERE = "pytest.mark.any_worker"
"""Each test of a file that has this mark is a group."""
GRACE_S = 60
"""The time that a test's teardown may take after its time limit."""


@cache
def _text_of(file: Path) -> str:
    return file.read_text()


class GroupScheduling(LoadScopeScheduling):
    """xdist asks for the scope of a test, and gives a worker whole scopes."""

    def _split_scope(self, nodeid: str) -> str:
        """Tests of one group run in one worker."""
        file = nodeid.partition("::")[0]
        text = _text_of(self.config.rootpath / file)
        if SHARED in text:
            return SHARED
        return nodeid if ANYWHERE in text else file

    def last_of(self, node: Any) -> str:
        """The test that a worker is running, else its last."""
        units = self.assigned_work.get(node, {}).values()
        tests = {nodeid: is_done for unit in units for nodeid, is_done in unit.items()}
        return next((nodeid for nodeid, is_done in tests.items() if not is_done), [*tests, "collecting"][-1])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling | None:
    return GroupScheduling(config, log) if config.getoption("dist") == "loadgroup" else None


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object | None) -> None:
    """Report the test in which a worker died as failed, and end the run: other workers have ten seconds."""
    session = node.config.pluginmanager.getplugin("dsession")
    if error is None or not isinstance(session.sched, GroupScheduling):
        return
    test = session.sched.last_of(node)
    session.handle_crashitem(test, node)
    pytest.exit(f"worker {node.gateway.id} died in {test}: {error}")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End a process whose test outlasts its time limit where no signal reaches it, as in native code."""
    marker, config = item.get_closest_marker("timeout"), item.config
    limit_s = float(marker.args[0] if marker else config.getoption("timeout") or config.getini("timeout") or 0)
    if limit_s:
        _end_after(limit_s + GRACE_S, config)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """A failure ends all limits, for the sake of debuggers; but what the test leaves to its fixtures may hang."""
    if isinstance(node, pytest.Item) and not node.config.getoption("usepdb"):
        _end_after(GRACE_S, node.config)


def _end_after(seconds: float, config: pytest.Config) -> None:
    faulthandler.dump_traceback_later(seconds, exit=True, file=config.stash[fault_handler_stderr_fd_key])
