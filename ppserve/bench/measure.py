"""One run against a server: warm-up, then the load between two readings of the server's ledger.

A load is a closed loop of callers, or an open loop, which sends on time whatever the server does. In an open loop
latency counts from when a request was due. A generator that waits for a slow server and counts from when it sent
the request hides the waiting that the slow server causes ("coordinated omission").
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count

from ppserve.bench.caller import Answer, Caller
from ppserve.bench.ledger import between, read_ledger
from ppserve.bench.workload import Question, Workload
from ppserve.client import CallFailed
from ppserve.core.ledger.account import StageTimes

Ask = Callable[[Question, float], Awaitable[Answer]]
"""Sends a question; the second argument is when it was due (perf_counter, in seconds)."""


@dataclass(frozen=True, slots=True)
class Until:
    """When sending stops; requests in flight are then waited for. At least one of the two is set."""

    num_requests: int | None = None
    duration_s: float = math.inf

    def numbers(self) -> Iterator[int]:
        return iter(count() if self.num_requests is None else range(self.num_requests))


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Callers with one request at a time each."""

    concurrency: int


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests at given times."""

    arrivals_s: Iterable[float]
    """Seconds after the start, ascending."""
    rate: float
    """Requests per second, for the report."""


Load = ClosedLoop | OpenLoop


@dataclass(frozen=True, slots=True)
class Served:
    """A server and what it says about itself."""

    target: str
    model_id: str
    dtype: str
    num_stages: int
    """Of each replica."""
    num_tensor: int
    """Ranks of each stage."""
    num_replicas: int
    microbatches: int
    vocab_size: int
    max_context: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run, as measured."""

    served: Served
    load: Load
    seed: int
    answers: list[Answer]
    duration_s: float
    """From the first request to the last answer."""
    ledger: tuple[StageTimes, ...]
    """The stages' time meanwhile."""
    client_cpu_s: float
    """The load generator's own CPU time."""
    was_interrupted: bool
    """Ctrl-C ended it early."""


async def introduce(caller: Caller, target: str) -> Served:
    """Asks the server for its model and stages. Raises CallFailed."""
    model, topology = await caller.model_info(), await caller.topology()
    num_replicas = max(1, len(topology.replicas))
    return Served(
        target,
        model.model,
        model.dtype,
        num_stages=len(topology.stages) // num_replicas,
        num_tensor=max((len(stage.ranks) for stage in topology.stages), default=1),
        num_replicas=num_replicas,
        microbatches=topology.microbatches,
        vocab_size=model.architecture.vocab_size,
        max_context=model.max_context,
    )


async def warm_up(caller: Caller, workload: Workload, num_requests: int, concurrency: int) -> None:
    """Sends requests that are not counted. Raises CallFailed if one fails: the others would fail as well."""

    def question(number: int) -> Question:
        return workload.question(-1 - number)

    answers: list[Answer] = []
    await run_load(caller.ask, question, ClosedLoop(concurrency), Until(num_requests), answers)
    for answer in answers:
        if not answer.is_ok:
            raise CallFailed(answer.status, f"while warming up: {answer.problem}")


async def measure(caller: Caller, served: Served, workload: Workload, load: Load, until: Until) -> Measurement:
    """One run. Raises CallFailed when the server does not answer before or after it, not when requests fail.

    If this task is cancelled (Ctrl-C), the measurement has the requests that were answered until then.
    """
    before = read_ledger(await caller.topology())
    cpu_s, begun_s = time.process_time(), time.perf_counter()
    answers: list[Answer] = []
    was_interrupted = False
    try:
        await run_load(caller.ask, workload.question, load, until, answers)
    except asyncio.CancelledError:
        was_interrupted = True
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
    ended_s = max((answer.ended_s for answer in answers), default=begun_s)
    cpu_s = time.process_time() - cpu_s
    ledger = between(before, read_ledger(await caller.topology()))
    return Measurement(
        served, load, workload.seed, answers, ended_s - begun_s, ledger, cpu_s, was_interrupted
    )  # fmt: skip


async def run_load(
    ask: Ask, question: Callable[[int], Question], load: Load, until: Until, answers: list[Answer]
) -> None:
    """Asks the questions from number 0 on, and appends each answer when it has come.

    If this task is cancelled, so are the requests in flight.
    """
    if isinstance(load, ClosedLoop):
        await _closed_loop(ask, question, load, until, answers)
    else:
        await _open_loop(ask, question, load, until, answers)


async def _closed_loop(
    ask: Ask, question: Callable[[int], Question], load: ClosedLoop, until: Until, answers: list[Answer]
) -> None:
    numbers, ends_s = until.numbers(), time.perf_counter() + until.duration_s

    async def call_in_turn() -> None:
        while (now_s := time.perf_counter()) < ends_s and (number := next(numbers, None)) is not None:
            answers.append(await ask(question(number), now_s))

    async with asyncio.TaskGroup() as callers:
        for _ in range(load.concurrency):
            callers.create_task(call_in_turn())


async def _open_loop(
    ask: Ask, question: Callable[[int], Question], load: OpenLoop, until: Until, answers: list[Answer]
) -> None:
    async def call(asked: Question, intended_s: float) -> None:
        answers.append(await ask(asked, intended_s))

    begun_s = time.perf_counter()
    async with asyncio.TaskGroup() as calls:
        for at_s, number in zip(load.arrivals_s, until.numbers(), strict=False):
            if at_s >= until.duration_s:
                return
            # Made before it is due, so that making it adds no latency.
            asked, intended_s = question(number), begun_s + at_s
            # Also when late, for 0 s: without a pause the event loop would read no answers.
            await asyncio.sleep(max(0.0, intended_s - time.perf_counter()))
            calls.create_task(call(asked, intended_s))
