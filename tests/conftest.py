"""Which tests are slow, and how they are collected; what they share is in `running`."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

from tests import slow

# A shell that runs tests in the background has them ignore Ctrl-C, and so would every command that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Not all that tests use to ask a server on loopback knows that no proxy can reach it.
for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
    del os.environ[name]

pytest_plugins = ["tests.workers"]

E2E = Path(__file__).parent / "e2e"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--as-gpu", action="store_true", help="stages compute as GPUs do; for tests/e2e")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("numprocesses"):  # else pytest-xdist's workers run the tests, and this process none
        config.pluginmanager.import_plugin("tests.running")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: the collector would find nothing, now or later, and take a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        shares = "shared_server" in getattr(item, "fixturenames", ())
        if shares or E2E in item.path.parents or item.get_closest_marker("thorough"):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("slow"):
            slow.marked.add(item.nodeid)
