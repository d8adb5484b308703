"""How an answer over HTTP ends before its time: deadlines, callers who hang up or stall, a server that stops."""

from __future__ import annotations

import asyncio

import pytest

from ppserve.core.request import FinishReason
from ppserve.head.engine.streams import TokenOutput
from tests.head.api.http.asking import Served, raw, run


def test_the_caller_s_time_limit() -> None:
    async def scenario(served: Served) -> None:
        answer = await served.ask("/v1/completions", {"prompt": "a"}, x_request_timeout="0.3")
        assert (answer.status, answer.headers["x-should-retry"]) == (504, "false")
        (request,) = served.engine.requests
        assert request.deadline_s is not None
        assert served.engine.cancelled == {request.id: FinishReason.DEADLINE}
        stream = await served.ask("/v1/completions", {"prompt": "a", "stream": True}, x_request_timeout="0.3")
        assert (stream.status, stream.json["error"]["code"]) == (504, "deadline_exceeded")
        for wrong in ("soon", "-1", "0", "nan", "1e9"):
            answer = await served.ask("/v1/completions", {"prompt": "a"}, x_request_timeout=wrong)
            assert (answer.status, answer.json["error"]["param"]) == (400, "x-request-timeout")

    run(scenario, by_hand=True)


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
@pytest.mark.parametrize("stream", [True, False])
def test_hanging_up_reaches_the_engine(stream: bool, prompt: object) -> None:
    async def scenario(served: Served) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(raw("/v1/completions", {"prompt": prompt, "stream": stream}))
        await served.engine.until(lambda engine: len(engine.sinks) == len(prompt))
        writer.close()
        await served.engine.until(lambda engine: len(engine.cancelled) == len(prompt))
        assert set(served.engine.cancelled.values()) == {FinishReason.CANCELLED}

    run(scenario, by_hand=True)


def test_draining_lets_answers_finish_and_refuses_new_ones() -> None:
    async def scenario(served: Served) -> None:
        running = asyncio.create_task(served.stream(prompt="a"))
        await served.engine.until(lambda engine: bool(engine.sinks))
        # A second caller, who keeps his connection: new ones are not accepted any more in the end.
        async with asyncio.TaskGroup() as group:
            stopping = group.create_task(served.server.stop(20))
            await asyncio.sleep(0)
            answer = await served.ask("/v1/completions", {"prompt": "b"})
            assert (answer.status, answer.json["error"]["code"]) == (503, "draining")
            assert (await served.ask("/health")).status == 503
            assert not stopping.done()
            next(iter(served.engine.sinks.values())).push([TokenOutput(0, 0, 65, "A", finish=FinishReason.EOS)])
            assert [event["choices"][0]["text"] for event in await running] == ["A"]

    run(scenario, by_hand=True)
