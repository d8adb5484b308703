"""When requests are sent: by a closed loop of callers, or by an open loop, on time whatever the server does.

In an open loop latency counts from when a request was due. A generator that waits for a slow server and counts
from when it sent the request hides the waiting that the slow server causes ("coordinated omission").
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
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
    duration_s: float | None = None


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`concurrency` callers, each with one request at a time."""

    concurrency: int


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests at given times (seconds after the start, ascending). max_in_flight: further requests wait in the
    load generator, and their latency includes it."""

    arrivals_s: Iterable[float]
    max_in_flight: int | None = None


Load = ClosedLoop | OpenLoop


class Watch:
    """Is told of every event of a run; this one ignores them."""

    def sent(self) -> None:
        """A request was sent."""

    def answered(self, answer: Answer) -> None:
        """A request ended."""


async def run_load(
    ask: Ask, question: Callable[[int], Question], load: Load, until: Until, watch: Watch
) -> list[Answer]:
    """All answers, in the order of their questions' numbers, which count from 0."""
    run = _Run(ask, question, until, watch)
    await (run.closed(load.concurrency) if isinstance(load, ClosedLoop) else run.open(load))
    return sorted(run.answers, key=lambda answer: answer.question.number)


class _Run:
    def __init__(self, ask: Ask, question: Callable[[int], Question], until: Until, watch: Watch) -> None:
        assert until.num_requests is not None or until.duration_s is not None
        self._ask = ask
        self._question = question
        self._until = until
        self._watch = watch
        self._numbers = count() if until.num_requests is None else iter(range(until.num_requests))
        self._begun_s = time.perf_counter()
        self.answers: list[Answer] = []

    async def closed(self, concurrency: int) -> None:
        async with asyncio.TaskGroup() as callers:
            for _ in range(concurrency):
                callers.create_task(self._ask_in_turn())

    async def _ask_in_turn(self) -> None:
        while not self._is_over(time.perf_counter() - self._begun_s):
            number = next(self._numbers, None)
            if number is None:
                return
            question = self._question(number)
            await self._answer(question, time.perf_counter(), nullcontext())

    async def open(self, load: OpenLoop) -> None:
        room = asyncio.Semaphore(load.max_in_flight) if load.max_in_flight else nullcontext()
        async with asyncio.TaskGroup() as calls:
            for at_s, number in zip(load.arrivals_s, self._numbers, strict=False):
                if self._is_over(at_s):
                    return
                # Made before it is due, so that making it adds no latency.
                question = self._question(number)
                intended_s = self._begun_s + at_s
                # Also when late, for 0 s: without a pause the event loop would read no answers.
                await asyncio.sleep(max(0.0, intended_s - time.perf_counter()))
                calls.create_task(self._answer(question, intended_s, room))

    def _is_over(self, elapsed_s: float) -> bool:
        return self._until.duration_s is not None and elapsed_s >= self._until.duration_s

    async def _answer(
        self, question: Question, intended_s: float, room: AbstractAsyncContextManager[None]
    ) -> None:
        async with room:
            self._watch.sent()
            answer = await self._ask(question, intended_s)
            self.answers.append(answer)
            self._watch.answered(answer)
