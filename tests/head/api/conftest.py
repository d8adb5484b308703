"""Servers with a fake engine. A test says by its parameters which it needs, and may change the engine before it
asks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ppserve.head.api.request_handler import RequestHandler
from ppserve.v1.generation_pb2_grpc import GenerationServiceStub
from tests.fake_engine import KEYS, FakeEngine, handler_of, stub_of
from tests.fake_engine import served as served_grpc
from tests.head.api.http.asking import ROOMY, TEMPLATE, TOOL_TEMPLATE, Served, served_http


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def request_handler(engine: FakeEngine) -> RequestHandler:
    return handler_of(engine)


@pytest.fixture
async def stub(engine: FakeEngine) -> AsyncIterator[GenerationServiceStub]:
    async with served_grpc(engine) as (_, target), stub_of(target) as stub:
        yield stub


@pytest.fixture(scope="module")
async def http_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """One server for all tests of a file: uvicorn takes 0.2 s to stop."""
    path = tmp_path_factory.mktemp("template") / "chat.jinja"
    path.write_text(TEMPLATE)
    async with served_http(chat_template=path) as served:
        yield served


@pytest.fixture
async def served(http_server: Served) -> AsyncIterator[Served]:
    """A server over HTTP, for tests that change no more than the engine."""
    yield http_server
    http_server.engine.reset()
    http_server.counted.clear()


@pytest.fixture(scope="module")
async def tool_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    path = tmp_path_factory.mktemp("template") / "tools.jinja"
    path.write_text(TOOL_TEMPLATE)
    async with served_http(FakeEngine(ROOMY), chat_template=path) as served:
        yield served


@pytest.fixture
async def tool_served(tool_server: Served) -> AsyncIterator[Served]:
    """What `served` is, with a template for tools. Tests tell the engine what it says."""
    yield tool_server
    tool_server.engine.reset()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A file of keys."""
    (tmp_path / "keys").write_text(KEYS)
    return tmp_path / "keys"
