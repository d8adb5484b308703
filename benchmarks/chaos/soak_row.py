"""Row 13: many requests, some cancelled, a stage killed now and then: nothing may grow with their number.

The same is then done to a server with a leak planted in its head, which must be found.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from grpc import aio

from benchmarks.chaos.flatness import Growth, growth
from benchmarks.chaos.record import Record
from benchmarks.chaos.stage_rows import ROOT, formed, kill
from ppserve.v1 import generation_pb2 as pb
from ppserve.v1.generation_pb2_grpc import GenerationServiceStub
from tests.e2e.serving import Server, serving

CALLERS = 16
CANCELLED = 0.05
SONGS = 32
TOKENS = 4
WARM_TOKENS = 400
WARM_UP = 0.35
SAMPLE_EVERY_S = 0.25
# Half of the planted leak.
LIMIT_BYTES = 512.0
# Few blocks, so that the prefix cache and the memory that stages take ahead of use are full during the warm-up.
FLAGS = ("--kv-cache-memory", "16M", "--max-num-seqs", "32")

# Planted from outside: the head keeps 1 KB of every request for ever.
LEAK = """
import os, sys, threading, time

def plant():
    while not hasattr(sys.modules.get("ppserve.head.engine.loop"), "Engine"):
        time.sleep(0.01)
    engine, kept = sys.modules["ppserve.head.engine.loop"].Engine, []
    submit = engine.submit
    def leaking(self, *rest):
        kept.append(bytearray(b"x") * 1024)
        return submit(self, *rest)
    engine.submit = leaking

if os.environ.get("RANK") == "0" and "ppserve" in sys.orig_argv:
    threading.Thread(target=plant, daemon=True).start()
"""


@dataclass
class Life:
    """A process, and what was read of it each time, with the number of requests served until then.

    anonymous: its memory without that of files, which are shared. (Its share of shared memory, PSS, is of no use
    here: it changes when any other program begins or ends that has loaded the same libraries.)
    """

    kind: str
    process: psutil.Process
    rss: list[tuple[int, float]] = field(default_factory=list)
    anonymous: list[tuple[int, float]] = field(default_factory=list)
    descriptors: list[tuple[int, float]] = field(default_factory=list)
    threads: list[tuple[int, float]] = field(default_factory=list)

    def sample(self, served: int) -> None:
        with suppress(psutil.Error):  # it ended; the next look finds its successor
            with self.process.oneshot():
                rss, threads = self.process.memory_info().rss, self.process.num_threads()
            self.rss.append((served, rss))
            self.threads.append((served, threads))
            self.descriptors.append((served, self.process.num_fds()))
            with suppress(OSError, StopIteration):  # not every kernel says
                lines = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text().splitlines()
                kilobytes = next(line.split()[1] for line in lines if line.startswith("Anonymous:"))
                self.anonymous.append((served, 1024.0 * int(kilobytes)))

    def warm(self, samples: list[tuple[int, float]]) -> list[tuple[int, float]]:
        """Without its warm-up."""
        if not samples:
            return []
        first, last = samples[0][0], samples[-1][0]
        return [sample for sample in samples if sample[0] >= first + WARM_UP * (last - first)]

    def drift(self, samples: list[tuple[int, float]]) -> float:
        """How much the last third of what is warm exceeds the first, of numbers that should not move: medians."""
        warm = [value for _, value in self.warm(samples)]
        third = max(1, len(warm) // 3)
        return sorted(warm[-third:])[third // 2] - sorted(warm[:third])[third // 2] if warm else 0.0


@dataclass
class Soak:
    """One server under requests. number: of requests. kills: at equal distances, stages in turn."""

    server: Server
    number: int
    kills: int
    served: int = 0
    killed: int = 0
    cancelled: int = 0
    wrong: int = 0
    failed: int = 0
    lives: dict[int, Life] = field(default_factory=dict)
    songs: list[list[int]] = field(default_factory=list)
    asked: Iterator[int] = field(default_factory=lambda: iter(()))
    dice: random.Random = field(default_factory=lambda: random.Random(1))

    async def run(self) -> None:
        async with aio.insecure_channel(self.server.grpc) as channel:
            stub = GenerationServiceStub(channel)
            self.songs = [await ids_of(stub, song(seed)) for seed in range(SONGS)]
            # What the head remembers of its latest steps, for the live page and others, fills up.
            await asyncio.gather(*(ids_of(stub, song(seed, WARM_TOKENS)) for seed in range(CALLERS)))
            self.asked = iter(range(self.number))
            watching = asyncio.create_task(self._watch())
            await asyncio.gather(*(self._caller(stub) for _ in range(CALLERS)))
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            self.wrong += await ids_of(stub, song(0)) != self.songs[0]

    async def _caller(self, stub: GenerationServiceStub) -> None:
        for number in self.asked:
            seed = number % SONGS
            try:
                if self.dice.random() < CANCELLED:
                    self.cancelled += 1
                    await cut(stub, song(seed), self.dice.random() * 0.1)
                else:
                    self.wrong += await ids_of(stub, song(seed)) != self.songs[seed]
            except aio.AioRpcError:
                self.failed += 1
            self.served += 1

    async def _watch(self) -> None:
        begun_s, told_s = time.monotonic(), time.monotonic()
        while True:
            # In a thread: the system may take its time.
            await asyncio.to_thread(self._sample)
            if self.killed < self.kills and self.served >= (self.killed + 0.2) * self.number / self.kills:
                await asyncio.to_thread(self._lose, self.killed % 2)
            if time.monotonic() > told_s + 30.0:
                told_s = time.monotonic()
                rate, rss = self.served / (told_s - begun_s), self._head().rss[-1][1]
                print(f"13: {self.served} of {self.number}, {rate:.0f}/s, head {rss / 1e6:.1f} MB", flush=True)
            await asyncio.sleep(SAMPLE_EVERY_S)

    def _sample(self) -> None:
        current: dict[str, Life] = {}
        for process in self.server.processes():
            with suppress(psutil.Error):
                if process.pid not in self.lives:
                    self.lives[process.pid] = Life(kind_of(process), process)
                life = self.lives[process.pid]
                current.setdefault(life.kind, life)
        for life in current.values():
            life.sample(self.served)

    def _lose(self, stage: int) -> None:
        so_far, until_s = formed(self.server), time.monotonic() + 90.0
        kill([self.server.stage_pid(stage)])
        self.killed += 1
        while formed(self.server) == so_far:
            assert time.monotonic() < until_s, "no epoch after a stage was killed"
            time.sleep(0.05)

    def _head(self) -> Life:
        return next(life for life in self.lives.values() if life.kind == "head")

    def growths(self) -> dict[str, dict[str, Any]]:
        """Of each kind of process, what the one that lived longest says."""
        longest: dict[str, Life] = {}
        for life in self.lives.values():
            if life.kind not in longest or len(life.rss) > len(longest[life.kind].rss):
                longest[life.kind] = life
        told = defaultdict[str, dict[str, Any]](dict)
        for kind, life in sorted(longest.items()):
            for name, samples in (("rss", life.rss), ("anonymous", life.anonymous)):
                told[kind][name] = growth(life.warm(samples))
            told[kind]["descriptors"] = life.drift(life.descriptors)
            told[kind]["threads"] = life.drift(life.threads)
        return told


def kind_of(process: psutil.Process) -> str:
    words, rank = process.cmdline(), process.environ().get("RANK")
    if "ppserve.stage" in words:
        return f"{'stage' if process.name() == 'ppserve.stage' else 'fork server'} {rank}"
    if "ppserve" in words and rank is not None:
        return "head" if rank == "0" else f"keeper {rank}"
    return "launcher"


def song(seed: int, tokens: int = TOKENS) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text=f"Once upon a time, {seed} small boats",
        sampling=pb.SamplingParams(seed=seed),
        stop=pb.StopConditions(max_tokens=tokens, ignore_eos=True),
        output=pb.OutputOptions(token_ids=True),
    )


async def ids_of(stub: GenerationServiceStub, request: pb.GenerateRequest) -> list[int]:
    return [token.id async for message in stub.Generate(request, timeout=120) for token in message.tokens]


async def cut(stub: GenerationServiceStub, request: pb.GenerateRequest, after_s: float) -> None:
    """Asks, and hangs up: at once, while it waits, or between tokens."""
    request.stop.max_tokens = 10 * TOKENS
    call = stub.Generate(request, timeout=120)
    await asyncio.sleep(after_s)
    call.cancel()


def soak(number: int, kills: int, leaks: bool) -> tuple[dict[str, Any], bool]:
    """Its figures; whether they are flat."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "sitecustomize.py").write_text(LEAK)
        env = {"PYTHONPATH": os.pathsep.join([directory, str(ROOT)])} if leaks else {}
        with serving(2, *FLAGS, env=env) as server:
            begun_s = time.monotonic()
            one = Soak(server, number, kills)
            asyncio.run(one.run())
            took_s = time.monotonic() - begun_s
    found = one.growths()
    flat = all(is_flat(of, is_head=kind == "head") for kind, of in found.items())
    shown = {kind: {name: in_words(value) for name, value in of.items()} for kind, of in found.items()}
    told = {"requests": one.served, "cancelled": one.cancelled, "kills": one.killed, "wrong": one.wrong}
    told |= {"failed": one.failed, "per_s": round(one.served / took_s), "bytes_per_request": shown}
    return told, flat and not one.wrong and not one.failed


def is_flat(of: dict[str, Any], is_head: bool) -> bool:
    """The head lives all the time and sees every request, so it must be shown to be flat. Stages and keepers live
    for a part of them: they must not be shown to grow."""
    memory: list[Growth] = [value for value in (of["rss"], of["anonymous"]) if value is not None]
    if is_head and not (memory and memory[0].surely_below(LIMIT_BYTES)):
        return False
    return not any(g.plainly_above(LIMIT_BYTES) for g in memory) and max(of["descriptors"], of["threads"]) <= 1


def in_words(value: Any) -> Any:
    """A growth with its bounds; a drift as it is."""
    if isinstance(value, Growth):
        return f"{value.per_request:.0f} ({value.low:.0f} to {value.high:.0f})"
    return value


def soaked(record: Record, short: bool) -> dict[str, Any]:
    """13: 100,000 requests, 5% cancelled, a stage killed now and then; then a leak that must be found."""
    record.close()
    told, flat = soak(3_000 if short else 100_000, 1 if short else 20, leaks=False)
    leaking, missed = soak(3_000, 1, leaks=True)
    told |= {"with_a_leak": leaking["bytes_per_request"]["head"], "leak_found": not missed}
    return {**told, "met": flat and not missed}


ROWS = {13: soaked}
