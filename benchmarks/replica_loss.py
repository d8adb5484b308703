"""How long streams pause when a rank of a shape is killed, and whether their tokens stay the same.

    python benchmarks/replica_loss.py [--shape 1x1x2] [--rounds 20] [--streams 8]
    python benchmarks/replica_loss.py --shape 2x2x1 --rounds 80       # each rank of 2 x 2 is killed 20 times

A shape is tensor ranks x stages x replicas. Each round: so many streams of the built-in model in float32; when
all are well under way, `kill -9` of the process that computes as one of the ranks, by turns. A pause is the
longest time between two messages of a stream after the kill; beside it stands the longest of a round without a
kill. With one replica the streams wait until the rank is back. Ends with an error where a token differs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import time
from contextlib import suppress

import psutil
from local_server import running

from ppserve.client import AsyncClient

TOKENS = 300
UNDER_WAY = 30


class Streams:
    """So many streams at once; `killed_s` is set in their middle."""

    def __init__(self, target: str, count: int) -> None:
        self._target = target
        self._count = count
        self.killed_s: float | None = None
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.pauses_s = [0.0] * count

    async def run(self) -> None:
        async with AsyncClient(self._target) as client:
            await asyncio.gather(*(self._one(client, number) for number in range(self._count)))

    async def _one(self, client: AsyncClient, number: int) -> None:
        last_s = time.monotonic()
        prompt = f"Once upon a time, {number} small boats"
        stream = client.stream(prompt, seed=number, max_tokens=TOKENS, ignore_eos=True, token_ids=True)
        async for chunk in stream:
            now_s = time.monotonic()
            if self.killed_s is not None:
                self.pauses_s[number] = max(self.pauses_s[number], now_s - max(last_s, self.killed_s))
            last_s = now_s
            self.tokens[number] += [token.id for token in chunk.tokens]

    async def are_under_way(self) -> None:
        while min(map(len, self.tokens)) < UNDER_WAY:
            await asyncio.sleep(0.005)


def stage_pid(rank: int) -> int:
    """Of the one server that this process has started."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if process.name() == "ppserve.stage" and process.environ().get("RANK") == str(rank):
                return process.pid
    raise SystemExit(f"no stage of rank {rank}")


async def all_serve(target: str) -> None:
    """As a server that has served for a while."""
    async with AsyncClient(target) as client:
        while not all(replica.serves for replica in (await client.topology()).replicas):
            await asyncio.sleep(0.05)
        await asyncio.gather(*(client.generate("Once", seed=seed, max_tokens=20) for seed in range(8)))


async def measure(target: str, rounds: int, count: int, ranks: int) -> None:
    calm = Streams(target, count)
    await calm.run()
    await all_serve(target)
    control = Streams(target, count)
    control.killed_s = time.monotonic()  # by nobody
    await control.run()
    print(f"without a kill: longest pause {1e3 * max(control.pauses_s):.0f} ms", flush=True)
    longest_s: list[float] = []
    for number in range(rounds):
        await all_serve(target)
        streams = Streams(target, count)
        running_streams = asyncio.create_task(streams.run())
        await streams.are_under_way()
        streams.killed_s = time.monotonic()
        os.kill(stage_pid(number % ranks), signal.SIGKILL)
        await running_streams
        if streams.tokens != calm.tokens:
            raise SystemExit(f"{number}: rank {number % ranks} killed, and other tokens than undisturbed")
        longest_s.append(max(streams.pauses_s))
        print(f"{number}: rank {number % ranks} killed, longest pause {1e3 * longest_s[-1]:.0f} ms", flush=True)
    middle, worst = (f"{1e3 * seconds:.0f} ms" for seconds in (statistics.median(longest_s), max(longest_s)))
    print(f"{rounds} kills, all tokens the same; longest pause of a round: median {middle}, worst {worst}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--shape", default="1x1x2")
    asked = parser.parse_args()
    tensor, stages, replicas = map(int, asked.shape.split("x"))
    shape = [f"--tensor-parallel={tensor}", f"--stages={stages}", f"--replicas={replicas}"]
    with running([*shape, "--dtype=float32", "--threads=1", "--force-cpu"]) as address:
        asyncio.run(measure(address.grpc, asked.rounds, asked.streams, tensor * stages * replicas))


if __name__ == "__main__":
    main()
