"""Callers in a process of their own: so many at a time, or so many a second. Prints what they saw as JSON.

    PYTHONPATH=. python -m benchmarks.chaos.callers --target HOST:PORT --closed 12 --seconds 30
    PYTHONPATH=. python -m benchmarks.chaos.callers --target HOST:PORT --rate 70 --seconds 30

How busy the process was, and how much later than meant it sent, tell whether the times are its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from grpc import aio

from ppserve.v1 import generation_pb2 as pb
from ppserve.v1.generation_pb2_grpc import GenerationServiceStub


@dataclass
class Seen:
    """good: answers in time. late: answers after their limit. refused_s: from the call to the refusal. behind_s:
    how much later than meant each call was made."""

    sent: int = 0
    good: int = 0
    late: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    refused_s: list[float] = field(default_factory=list)
    behind_s: list[float] = field(default_factory=list)


async def ask(stub: GenerationServiceStub, seen: Seen, flags: argparse.Namespace) -> None:
    begun_s = time.monotonic()
    request = pb.GenerateRequest(text="Once upon")
    request.sampling.seed = seen.sent
    request.stop.max_tokens, request.stop.ignore_eos = flags.tokens, True
    seen.sent += 1
    try:
        async for _message in stub.Generate(request, timeout=flags.limit):
            pass
    except aio.AioRpcError as error:
        seen.failures[error.code().name] += 1
        if error.code().name == "RESOURCE_EXHAUSTED":
            seen.refused_s.append(time.monotonic() - begun_s)
        return
    in_time = time.monotonic() - begun_s <= flags.limit
    seen.good += in_time
    seen.late += not in_time


async def closed(stub: GenerationServiceStub, seen: Seen, flags: argparse.Namespace) -> None:
    until_s = time.monotonic() + flags.seconds

    async def caller() -> None:
        while time.monotonic() < until_s:
            await ask(stub, seen, flags)

    await asyncio.gather(*(caller() for _ in range(flags.closed)))


async def open_loop(stub: GenerationServiceStub, seen: Seen, flags: argparse.Namespace) -> None:
    dice, tasks = random.Random(0), set[asyncio.Task[None]]()
    due_s = time.monotonic()
    until_s = due_s + flags.seconds
    while (due_s := due_s + dice.expovariate(flags.rate)) < until_s:
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        seen.behind_s.append(time.monotonic() - due_s)
        task = asyncio.create_task(ask(stub, seen, flags))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)


async def run(flags: argparse.Namespace) -> dict[str, Any]:
    seen = Seen()
    async with aio.insecure_channel(flags.target) as channel:
        stub = GenerationServiceStub(channel)
        begun_s, cpu_s = time.monotonic(), time.process_time()
        await (closed if flags.closed else open_loop)(stub, seen, flags)
        took_s = time.monotonic() - begun_s
        busy = (time.process_time() - cpu_s) / took_s
    return {**vars(seen), "seconds": took_s, "busy": busy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--closed", type=int, default=0, help="callers, each with one request at a time")
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second, answered or not")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--limit", type=float, default=8.0, help="seconds that a caller waits")
    print(json.dumps(asyncio.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
