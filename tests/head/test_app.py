"""The head's process: what it leaves behind, and that its servers close whenever they are asked to."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from contextlib import closing
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ppserve.config import ServeConfig, ServerSettings
from ppserve.errors import StagesLost
from ppserve.head.api.call import Call
from ppserve.head.app import HeadProcess
from ppserve.head.options import GenerationOptions
from ppserve.head.servers import Servers
from ppserve.process.environment import RankEnvironment
from ppserve.v1 import generation_pb2 as pb
from tests.fake_engine import FakeEngine, code_of, handler_of, stub_of
from tests.ports import port_to_come_back_to

SETTINGS = ServerSettings(port=0, http_port=0, metrics_port=0)
WITHIN_S = 20.0


def test_a_keeper_that_fails_ends_the_server_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the head would go on without stage 0: it ends with the thread that started it."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of this test only")

    def fork() -> None:
        raise ValueError("filedescriptor out of range")

    async def run() -> int:
        forks: Any = SimpleNamespace(fork=fork, close=int)
        config = ServeConfig(server=SETTINGS)
        return await HeadProcess(config, RankEnvironment(0, 1, 0, 1), forks).run()

    with pytest.raises(StagesLost, match="stage 0 cannot be kept alive: filedescriptor out of range"):
        asyncio.run(run())


async def test_the_metrics_port_says_how_the_server_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of this test only")
    looked = threading.Event()

    def fork() -> None:
        assert looked.wait(WITHIN_S)
        raise ValueError("that is enough")

    port = port_to_come_back_to()
    config = ServeConfig(server=replace(SETTINGS, metrics_port=port))
    head = HeadProcess(config, RankEnvironment(0, 1, 0, 1), cast(Any, SimpleNamespace(fork=fork, close=int)))

    def ask(path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN_S)
        connection.request("GET", path)
        with closing(connection), connection.getresponse() as answer:
            return answer.status, answer.read().decode()

    async def run() -> int:
        return await head.run()

    running = asyncio.create_task(run())
    await asyncio.sleep(0)  # it listens
    status, state = await asyncio.to_thread(ask, "/state.json")
    assert (status, json.loads(state)["status"]) == (200, "starting")
    assert json.loads(state)["start"] == "importing"
    assert (await asyncio.to_thread(ask, "/load.json"))[0] == 200
    looked.set()
    with pytest.raises(StagesLost, match="that is enough"):
        await running


@pytest.mark.parametrize(("host", "warns"), [("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)])
async def test_listening_beyond_loopback_without_tls_is_said_once(
    host: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    settings = replace(SETTINGS, host=host)
    servers = Servers(settings, handler_of(FakeEngine(), settings), lambda path, status: None)
    await servers.open(0)
    await servers.close(0.0, asyncio.get_running_loop().create_future())
    assert sum("without TLS" in message for message in caplog.messages) == warns


@pytest.mark.parametrize("has_stream", [False, True])
@pytest.mark.parametrize("num_turns", [0, 1, 4])
async def test_two_signals_right_behind_the_start_close_the_servers_whatever_had_begun(
    num_turns: int, has_stream: bool
) -> None:
    """num_turns: of the event loop, between the two."""
    handler = handler_of(FakeEngine(halt_after=1), SETTINGS)
    servers = Servers(SETTINGS, handler, lambda path, status: None)
    ports = await servers.open(9)
    assert (handler.metrics_port, ports.metrics) == (9, 9)
    handler.set_serving(True)
    at_once = asyncio.get_running_loop().create_future()
    async with stub_of(f"127.0.0.1:{ports.grpc}") as stub:
        call = stub.Generate(pb.GenerateRequest(text="x")) if has_stream else None
        if call is not None:
            await anext(aiter(call))
        closing = asyncio.create_task(servers.close(600.0, at_once))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        at_once.set_result(None)
        await asyncio.wait_for(closing, WITHIN_S)
        assert call is None or (await code_of(call)).name == "UNAVAILABLE"


async def test_streams_are_ended_once_also_where_a_server_does_not_close(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ppserve.head.servers._CLOSES_WITHIN_S", 0.5)

    async def stop_late(stop: Any) -> None:
        await stop()
        await asyncio.sleep(WITHIN_S)

    handler = handler_of(FakeEngine(by_hand=True), SETTINGS)
    servers = Servers(SETTINGS, handler, lambda path, status: None)
    monkeypatch.setattr(servers._http, "stop", partial(stop_late, servers._http.stop))
    await servers.open(0)
    async with handler.generate(GenerationOptions(), "", Call.begin({}, b"", "", has_keys=False)):
        await servers.close(0.0, asyncio.get_running_loop().create_future())
    assert caplog.text.count("ended 1 streams") == 1
    assert "have not closed within 0.5 s" in caplog.text
