"""Row 13: many requests, some cancelled, a stage killed now and then. Nothing may grow with their number.

The same is then done to a server with a leak planted in its head, which must be found.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import psutil
from grpc import aio

from benchmarks.chaos.faults import ROOT, kill, num_epochs, wait_for
from benchmarks.chaos.record import Record
from ppserve.v1 import generation_pb2 as pb
from ppserve.v1.generation_pb2_grpc import GenerationServiceStub
from tests.e2e.serving import Server, serving

CALLERS = 16
CANCELLED = 0.05
NUM_TEXTS = 32
TOKENS = 4
WARM_UP = 0.35
SAMPLE_EVERY_S = 0.25
NUM_PARTS = 8
# The 97.5% quantile of Student's t with 6 degrees of freedom: of 7 growths from part to part.
STUDENT = 2.447
LEAK_BYTES = 1024
LIMIT_BYTES = LEAK_BYTES / 2
# Few blocks, so that the prefix cache is full during the warm-up.
FLAGS = ("--kv-cache-memory", "16M", "--max-num-seqs", "32")
# Planted from outside: the head keeps some memory of every request.
LEAK = f"""
import os, sys, threading, time

def plant():
    while not hasattr(sys.modules.get("ppserve.head.engine.loop"), "Engine"):
        time.sleep(0.01)
    engine, kept = sys.modules["ppserve.head.engine.loop"].Engine, []
    submit = engine.submit
    def leaking(self, *rest):
        kept.append(bytearray(b"x") * {LEAK_BYTES})
        return submit(self, *rest)
    engine.submit = leaking

if os.environ.get("RANK") == "0" and "ppserve" in sys.orig_argv:
    threading.Thread(target=plant, daemon=True).start()
"""


@dataclass(frozen=True, slots=True)
class Growth:
    """How much what was sampled grows with each request, with the bounds of a 95% interval."""

    per_request: float
    low: float
    high: float


def growth(samples: Sequence[tuple[int, float]]) -> Growth | None:
    """samples: (requests served, what was measured), in order. None if they are too few to say anything.

    The samples become the means of 8 equal parts. Memory that an allocator has taken it keeps, so the deviations
    of successive samples from a line are not independent, and a fit of them all would claim far too narrow bounds.
    The growths from part to part are nearly so: their mean is the growth, their spread gives its bounds.
    """
    if not samples or samples[-1][0] - samples[0][0] < NUM_PARTS:
        return None
    first, last = samples[0][0], samples[-1][0]
    width = (last - first) / NUM_PARTS
    parts: list[list[float]] = [[] for _ in range(NUM_PARTS)]
    for served, value in samples:
        parts[min(NUM_PARTS - 1, int((served - first) / width))].append(value)
    if not all(parts):
        return None
    growths = [(b - a) / width for a, b in pairwise(map(fmean, parts))]
    off = STUDENT * stdev(growths) / len(growths) ** 0.5
    return Growth(fmean(growths), fmean(growths) - off, fmean(growths) + off)


class Soak:
    """One server under requests, and the memory of its head after each so many."""

    def __init__(self, server: Server, num_requests: int, num_kills: int) -> None:
        self.figures = dict.fromkeys(("served", "cancelled", "killed", "wrong", "failed"), 0)
        self.rss: list[tuple[int, float]] = []
        self._server = server
        self._num_requests, self._num_kills = num_requests, num_kills
        self._numbers = iter(range(num_requests))
        self._chance = random.Random(1)
        self._expected: list[list[int]] = []

    async def run(self) -> None:
        async with aio.insecure_channel(self._server.grpc) as channel:
            stub = GenerationServiceStub(channel)
            self._expected = [await token_ids(stub, text_request(seed)) for seed in range(NUM_TEXTS)]
            watching = asyncio.create_task(self._watch())
            await asyncio.gather(*(self._call_in_turn(stub) for _ in range(CALLERS)))
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _call_in_turn(self, stub: GenerationServiceStub) -> None:
        for number in self._numbers:
            seed = number % NUM_TEXTS
            try:
                if self._chance.random() < CANCELLED:
                    self.figures["cancelled"] += 1
                    call = stub.Generate(text_request(seed, 10 * TOKENS), timeout=120)
                    await asyncio.sleep(self._chance.random() * 0.1)
                    call.cancel()
                else:
                    found = await token_ids(stub, text_request(seed))
                    self.figures["wrong"] += found != self._expected[seed]
            except aio.AioRpcError:
                self.figures["failed"] += 1
            self.figures["served"] += 1

    async def _watch(self) -> None:
        head = psutil.Process(self._server.head_pid())
        while True:
            served, killed = self.figures["served"], self.figures["killed"]
            self.rss.append((served, head.memory_info().rss))
            if killed < self._num_kills and served >= (killed + 0.2) * self._num_requests / self._num_kills:
                await asyncio.to_thread(self._lose, killed % 2)
            await asyncio.sleep(SAMPLE_EVERY_S)

    def _lose(self, stage: int) -> None:
        so_far = num_epochs(self._server)
        kill([self._server.stage_pid(stage)])
        self.figures["killed"] += 1
        wait_for(lambda: num_epochs(self._server) > so_far, "an epoch")

    def head_growth(self) -> Growth | None:
        """Return the growth of the head's memory after the warm-up."""
        return growth([sample for sample in self.rss if sample[0] >= WARM_UP * self._num_requests])


def text_request(seed: int, tokens: int = TOKENS) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text=f"Once upon a time, {seed} small boats",
        sampling=pb.SamplingParams(seed=seed),
        stop=pb.StopConditions(max_tokens=tokens, ignore_eos=True),
        output=pb.OutputOptions(token_ids=True),
    )


async def token_ids(stub: GenerationServiceStub, request: pb.GenerateRequest) -> list[int]:
    return [token.id async for message in stub.Generate(request, timeout=120) for token in message.tokens]


def soak_server(num_requests: int, num_kills: int, leaks: bool) -> tuple[dict[str, Any], Growth | None]:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "sitecustomize.py").write_text(LEAK)
        env = {"PYTHONPATH": os.pathsep.join([directory, str(ROOT)])} if leaks else {}
        with serving(2, *FLAGS, env=env) as server:
            soak = Soak(server, num_requests, num_kills)
            asyncio.run(soak.run())
    return soak.figures, soak.head_growth()


def soak(record: Record, short: bool) -> dict[str, Any]:
    """13: 100,000 requests, 5% cancelled, a stage killed now and then; then a leak that must be found."""
    record.close()
    figures, found = soak_server(3_000 if short else 100_000, 1 if short else 20, leaks=False)
    _, leaking = soak_server(3_000, 1, leaks=True)
    flat = found is not None and found.high < LIMIT_BYTES
    leak_found = leaking is not None and leaking.low > LIMIT_BYTES
    told = {**figures, "bytes_per_request": found and round(found.per_request), "leak_found": leak_found}
    return {**told, "met": flat and leak_found and not figures["wrong"] and not figures["failed"]}


ROWS = {13: soak}
