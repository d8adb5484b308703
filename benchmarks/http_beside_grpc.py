"""HTTP beside gRPC on one server: tokens per second, and what the head's CPU spends on a token.

    python benchmarks/http_beside_grpc.py
    python benchmarks/http_beside_grpc.py --serve "--stages 2 --dtype float32" --streams 64 --tokens 128 --rounds 7

So many streams at once ask for the same number of tokens each, with prompts of their own, over one protocol; then
the same over the other; rounds take turns, so that whatever else the machine does meets both. Callers read bytes
and parse nothing, for both protocols alike: the load shares the cores with the server. Figures are medians over
rounds; compare ratios of one run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import psutil
from grpc import aio
from local_server import Address, running

from ppserve.v1 import generation_pb2 as pb

GENERATE = "/ppserve.v1.GenerationService/Generate"


@dataclass(frozen=True, slots=True)
class Round:
    """One round over one protocol. events: messages, or server-sent events with tokens."""

    tokens_per_s: float
    head_us_per_token: float
    events_per_token: float


@dataclass(frozen=True, slots=True)
class Shape:
    streams: int
    tokens: int


def prompt(number: int) -> str:
    return f"Story {number}: once upon a time"


async def over_grpc(address: Address, shape: Shape, first: int) -> int:
    """How many messages came."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with aio.insecure_channel(address.grpc, options=options) as channel:
        call = channel.unary_stream(GENERATE)

        async def one(number: int) -> int:
            stop = pb.StopConditions(max_tokens=shape.tokens, ignore_eos=True)
            asked = pb.GenerateRequest(text=prompt(number), stop=stop, sampling=pb.SamplingParams(seed=number))
            return len([raw async for raw in call(asked.SerializeToString())])

        return sum(await asyncio.gather(*[one(first + k) for k in range(shape.streams)]))


async def over_http(address: Address, shape: Shape, first: int) -> int:
    """How many events with tokens came."""
    host, _, port = address.http.rpartition(":")

    async def one(number: int) -> int:
        body = {"prompt": prompt(number), "max_tokens": shape.tokens, "ignore_eos": True, "seed": number}
        content = json.dumps({**body, "stream": True}).encode()
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        events, last = 0, b""
        while b"data: [DONE]" not in last:
            piece = await reader.read(1 << 16)
            assert piece, "the connection ended"
            events += piece.count(b"data: {")
            last = last[-16:] + piece
        writer.close()
        return events

    return sum(await asyncio.gather(*[one(first + k) for k in range(shape.streams)]))


async def timed(
    ask: Callable[[Address, Shape, int], Awaitable[int]], address: Address, shape: Shape, first: int
) -> Round:
    head = _head(address)
    before, begun_s = head.cpu_times(), time.monotonic()
    events = await ask(address, shape, first)
    took_s, after = time.monotonic() - begun_s, head.cpu_times()
    tokens = shape.streams * shape.tokens
    cpu_s = after.user + after.system - before.user - before.system
    return Round(tokens / took_s, 1e6 * cpu_s / tokens, events / tokens)


def _head(address: Address) -> psutil.Process:
    port = int(address.metrics.rpartition(":")[2])
    listening = (c.pid for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port)
    return psutil.Process(next(pid for pid in listening if pid is not None))


async def measure(flags: list[str], shape: Shape, rounds: int) -> None:
    protocols = {"gRPC": over_grpc, "HTTP": over_http}
    seen: dict[str, list[Round]] = {name: [] for name in protocols}
    with running(flags) as address:
        for number in range(-1, rounds):  # the first one warms up
            for place, (name, ask) in enumerate(protocols.items()):
                first = (2 * (number + 1) + place) * shape.streams
                found = await timed(ask, address, shape, first)
                if number >= 0:
                    seen[name].append(found)
    for name, found in seen.items():
        rates = sorted(each.tokens_per_s for each in found)
        print(
            f"{name}: {statistics.median(rates):.0f} tokens/s ({rates[0]:.0f} to {rates[-1]:.0f}), head"
            f" {statistics.median(each.head_us_per_token for each in found):.0f} us/token,"
            f" {statistics.median(each.events_per_token for each in found):.2f} events/token"
        )
    pairs = list(zip(seen["HTTP"], seen["gRPC"], strict=True))
    rate = statistics.median(http.tokens_per_s / grpc.tokens_per_s for http, grpc in pairs)
    cpu = statistics.median(http.head_us_per_token / grpc.head_us_per_token for http, grpc in pairs)
    print(f"HTTP / gRPC, medians of {rounds} pairs: tokens/s {rate:.2f}, head's CPU per token {cpu:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", default="--stages 2", help="flags of the server")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    asyncio.run(measure(shlex.split(asked.serve), Shape(asked.streams, asked.tokens), asked.rounds))


if __name__ == "__main__":
    main()
