"""The servers of one head: they close, whenever they are asked to."""

from __future__ import annotations

import asyncio

import pytest

from ppserve.config import ServerSettings
from ppserve.head.servers import Servers
from ppserve.v1 import generation_pb2 as pb
from tests.fake_engine import FakeEngine, code_of, handler_of, stub_of

SETTINGS = ServerSettings(port=0, http_port=0, metrics_port=0)
WITHIN_S = 20.0


@pytest.mark.parametrize("has_stream", [False, True])
@pytest.mark.parametrize("num_turns", [0, 1, 4])
def test_two_signals_right_behind_the_start_close_the_servers_whatever_had_begun(
    num_turns: int, has_stream: bool
) -> None:
    """num_turns: of the event loop, between the two."""

    async def main() -> None:
        handler = handler_of(FakeEngine(halt_after=1), SETTINGS)
        servers = Servers(SETTINGS, handler, lambda path, status: None, {})
        ports = await servers.open()
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

    asyncio.run(main())
