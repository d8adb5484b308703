"""Shared by all tests: what they may assume of the machine, which are slow, and a server that nobody hurts."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests import as_gpu, slow
from tests.e2e.serving import Server, serving
from tests.fake_engine import FakeEngine, served_in_thread

# Ranks are forked from here: if torch asked CUDA itself whether there are GPUs, they could not use them.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

# Triton reads it when it is first imported, by whichever test: without a GPU its kernels are interpreted.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Workers share the cores: threads of torch's own would spend more time waiting for each other than they save.
torch.set_num_threads(1)

# No deadline: a slow moment of a shared machine is not a defect.
settings.register_profile("ppserve", deadline=None)
settings.load_profile("ppserve")

# A shell that runs tests in the background has them ignore Ctrl-C, and so would every command that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["tests.workers"]

E2E = Path(__file__).parent / "e2e"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--as-gpu", action="store_true", help="stages compute as GPUs do; for tests/e2e")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--as-gpu"):
        as_gpu.choose()


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
        if shares or E2E in item.path.parents:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("slow"):
            slow.marked.add(item.nodeid)


@pytest.fixture
def anyio_backend() -> str:
    """What runs tests that are coroutines."""
    return "asyncio"


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Server]:
    """A server of two stages over gloo, for tests that only talk to it."""
    chats = ("--chat-template", str(E2E / "chat.jinja"))
    with serving(2, "--layers", "4,4", "--transport", "gloo", "--vllm-grpc", *chats) as server:
        yield server


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    """A gRPC server without a model, in a thread."""
    with served_in_thread(FakeEngine()) as target:
        yield target
