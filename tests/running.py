"""What a process that runs tests needs: settings of torch, and servers. Its imports take three seconds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests import as_gpu
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


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--as-gpu"):
        as_gpu.choose()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """What runs tests that are coroutines."""
    return "asyncio"


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Server]:
    """A server of two stages over gloo, for tests that only talk to it."""
    chats = ("--chat-template", str(Path(__file__).parent / "e2e/chat.jinja"))
    with serving(2, "--layers", "4,4", "--transport", "gloo", "--vllm-grpc", *chats) as server:
        yield server


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    """A gRPC server without a model, in a thread."""
    with served_in_thread(FakeEngine()) as target:
        yield target
