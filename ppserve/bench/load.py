"""When requests are sent: by a closed loop of callers, or by an open loop, on time whatever the server does.

In an open loop latency counts from when a request was due. A generator that waits for a slow server and counts
from when it sent the request hides the waiting that the slow server causes ("coordinated omission").
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count

from ppserve.bench.caller import Answer
from ppserve.bench.workload import Question

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
