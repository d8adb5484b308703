"""Hardship for a running server: cancellations, a crowd, strange requests. Not part of the test suite.

    ppserve serve --stages 2 --port 50051 --metrics-port 9400
    python benchmarks/service_soak.py cancel --count 20000
    python benchmarks/service_soak.py crowd --count 1000
    python benchmarks/service_soak.py fuzz --count 10000

Each ends with one line of figures, or with an AssertionError. The server's processes are those that hold its
metrics port and their children; a canary request is asked alone before and after, and must answer the same. HTTP's
hardship is benchmarks/fuzz_http.py.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import random
import re
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import psutil
from grpc import aio

from ppserve.v1 import generation_pb2 as pb
from ppserve.v1.generation_pb2_grpc import GenerationServiceStub

GENERATE = "/ppserve.v1.GenerationService/Generate"
HELD = ("requests_running", "requests_waiting", "kv_usage_ratio")
# What a strange request may be answered with.
DOCUMENTED = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}


class Server:
    """The server seen from outside: its head's process and its metrics."""

    def __init__(self, metrics: str) -> None:
        self._metrics = metrics
        port = int(metrics.rpartition(":")[2])
        pids = {c.pid for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port}
        self.head = psutil.Process(next(pid for pid in pids if pid is not None))
        self.stages = self.head.children(recursive=True)

    def gauge(self, name: str) -> float:
        """A metric, of all replicas together."""
        with urllib.request.urlopen(f"http://{self._metrics}/metrics", timeout=10) as answer:
            found = re.findall(rf"^{name}(?:{{.*?}})? (\S+)$", answer.read().decode(), re.MULTILINE)
        assert found, f"no metric {name}"
        return sum(map(float, found))

    def rss_bytes(self) -> int:
        return int(self.head.memory_info().rss)

    def cpu_s(self) -> float:
        times = self.head.cpu_times()
        return float(times.user + times.system)

    def processes(self) -> set[int]:
        return {self.head.pid, *(stage.pid for stage in self.head.children(recursive=True))}

    async def until_empty(self, timeout_s: float = 30.0) -> float:
        """Seconds until no request and no KV block is held any more."""
        begun = time.monotonic()
        while any(self.gauge(f"ppserve_{name}") for name in HELD):
            assert time.monotonic() - begun < timeout_s, "requests or blocks are still held"
            await asyncio.sleep(0.05)
        return time.monotonic() - begun


def song(seed: int, max_tokens: int = 32) -> pb.GenerateRequest:
    """A request whose answer depends on the seed."""
    return pb.GenerateRequest(
        text="Once upon a time",
        sampling=pb.SamplingParams(seed=seed),
        stop=pb.StopConditions(max_tokens=max_tokens, ignore_eos=True),
        output=pb.OutputOptions(token_ids=True),
    )


async def answer(stub: GenerationServiceStub, request: pb.GenerateRequest) -> tuple[list[int], int]:
    """The tokens of the first sequence, and how many messages they came in."""
    ids: list[int] = []
    num_messages = 0
    async for message in stub.Generate(request):
        ids.extend(token.id for token in message.tokens)
        num_messages += 1
    return ids, num_messages


async def cancel(stub: GenerationServiceStub, server: Server, count: int) -> str:
    """Calls cut at every phase: at once, while queued, in the prompt, after some tokens."""
    dice = random.Random(1)
    room = asyncio.Semaphore(64)

    async def one(number: int) -> None:
        async with room:
            request = song(number, max_tokens=64)
            request.sampling.n = dice.choice([1, 1, 2])
            request.text = "word " * dice.choice([1, 20, 200])
            call = stub.Generate(request)
            phase = dice.randrange(3)
            if phase == 1:
                await asyncio.sleep(dice.random() * 0.05)
            elif phase == 2:
                async for message in call:
                    if message.first_token >= dice.randrange(8):
                        break
            call.cancel()

    await asyncio.gather(*[one(number) for number in range(count // 10)])  # warms caches and allocators
    await server.until_empty()
    rss_bytes, begun = server.rss_bytes(), time.monotonic()
    await asyncio.gather(*[one(number) for number in range(count)])
    took_s = time.monotonic() - begun
    empty_s = await server.until_empty()
    grown = (server.rss_bytes() - rss_bytes) / count
    rate = count / took_s
    return f"{count} cancelled at {rate:.0f}/s; all freed after {empty_s:.2f} s; the head grew {grown:.0f} B/call"


async def crowd(stub: GenerationServiceStub, server: Server, count: int) -> str:
    """So many streams at once, each right."""
    alone = [(await answer(stub, song(seed)))[0] for seed in range(8)]
    begun, cpu_s = time.monotonic(), server.cpu_s()
    answers = await asyncio.gather(*[answer(stub, song(number % 8)) for number in range(count)])
    took_s = time.monotonic() - begun
    wrong = sum(ids != alone[number % 8] for number, (ids, _) in enumerate(answers))
    assert wrong == 0, f"{wrong} of {count} answers differ from those given alone"
    messages = sum(num_messages for _, num_messages in answers)
    share = (server.cpu_s() - cpu_s) / took_s
    tokens = sum(len(ids) for ids, _ in answers)
    return (
        f"{count} streams in {took_s:.1f} s: {tokens / took_s:.0f} tokens/s "
        f"in {messages / took_s:.0f} messages/s; the head used {share:.0%} of a core"
    )


async def fuzz(channel: aio.Channel, server: Server, count: int) -> str:
    """Structured requests, then twice as many byte strings."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tests.head.api.grpc.strange_requests import damaged, requests

    raws: list[bytes] = collected(requests.map(pb.GenerateRequest.SerializeToString), count)
    raws += collected(damaged(), 2 * count)
    codes: collections.Counter[grpc.StatusCode] = collections.Counter()
    room = asyncio.Semaphore(32)
    generate = channel.unary_stream(GENERATE)

    async def one(raw: bytes) -> None:
        async with room:
            try:
                async for _ in generate(raw):
                    pass
                codes[grpc.StatusCode.OK] += 1
            except aio.AioRpcError as error:
                codes[error.code()] += 1

    await asyncio.gather(*[one(raw) for raw in raws])
    assert set(codes) <= DOCUMENTED, codes
    await server.until_empty()
    return f"{len(raws)} strange requests: " + ", ".join(f"{code.name} {n}" for code, n in codes.items())


def collected(strategy: object, count: int) -> list[Any]:
    """So many examples of a strategy of hypothesis."""
    from hypothesis import HealthCheck, Phase, given, settings

    found: list[Any] = []

    @settings(
        max_examples=count, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def collect(example: object) -> None:
        found.append(example)

    collect()
    return found


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("hardship", choices=("cancel", "crowd", "fuzz"))
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--target", default="127.0.0.1:50051")
    parser.add_argument("--metrics", default="127.0.0.1:9400")
    asked = parser.parse_args()
    server = Server(asked.metrics)
    processes = server.processes()
    async with aio.insecure_channel(asked.target) as channel:
        stub = GenerationServiceStub(channel)
        canary, _ = await answer(stub, song(99))
        match asked.hardship:
            case "cancel":
                print(await cancel(stub, server, asked.count))
            case "crowd":
                print(await crowd(stub, server, asked.count))
            case "fuzz":
                print(await fuzz(channel, server, asked.count))
        assert (await answer(stub, song(99)))[0] == canary, "the canary sings differently"
    assert processes <= server.processes(), "processes died"


if __name__ == "__main__":
    asyncio.run(main())
