"""One run against a server: warm-up, then the load between two readings of the server's ledger.

A load is a closed loop of callers, or an open loop, which sends on time whatever the server does. An open loop's
latency counts from when a request was due. If it counted from sending, a generator that waits for a slow server
would hide that wait ("coordinated omission").
"""

from __future__ import annotations

import asyncio
import math
import random
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from ppserve.bench.caller import Answer, Caller, Question
from ppserve.bench.ledger import between, read_ledger
from ppserve.client import CallFailed
from ppserve.core.ledger.account import StageTimes

_REPORT_EVERY_S = 1.0

SendQuestion = Callable[[Question, float], Awaitable[Answer]]
"""A function that sends a question, whose second argument is when it was due (perf_counter, in seconds)."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A uniform distribution of numbers of tokens, both ends included."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Read `128` or `uniform:64:256`. Raises ValueError for anything else."""
        match = re.fullmatch(r"\s*(?:uniform:(\d{1,9}):)?(\d{1,9})\s*", text)
        most = int(match[2]) if match else 0
        least = int(match[1]) if match and match[1] else most
        if not 1 <= least <= most:
            raise ValueError(f"{text!r} is not a length such as 128 or uniform:64:256")
        return cls(least, most)

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.least, self.most)


@dataclass(frozen=True, slots=True)
class Workload:
    """Endless requests for a model."""

    prompt: Lengths
    new: Lengths
    """Lengths of answers, drawn independently of the prompts."""
    vocab_size: int
    seed: int = 0

    def question(self, number: int) -> Question:
        """Return the request with this number, which is below 0 for the warm-up. Its tokens are random."""
        rng = random.Random(f"question {self.seed} {number}")
        num_prompt, num_new = self.prompt.draw(rng), self.new.draw(rng)
        return Question(number, tuple(rng.choices(range(self.vocab_size), k=num_prompt)), num_new)


def poisson_arrivals(rate: float, seed: int) -> Iterator[float]:
    """Yield times in seconds without end, on average `rate` a second. If `rate` is infinite, all are 0."""
    rng = random.Random(f"arrivals {seed}")
    at_s = 0.0
    while True:
        yield at_s
        if not math.isinf(rate):
            at_s += rng.expovariate(rate)


@dataclass(frozen=True, slots=True)
class Until:
    """The end of sending; requests in flight still end. At least one of the two is set."""

    num_requests: int | None = None
    duration_s: float = math.inf


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A load of callers, each with one request at a time."""

    concurrency: int

    async def run(
        self, send: SendQuestion, questions: Iterator[Question], duration_s: float, answers: list[Answer]
    ) -> None:
        """Send questions for `duration_s`, and append answers as they arrive. Cancelling this cancels requests."""
        ends_s = time.perf_counter() + duration_s

        async def call_in_turn() -> None:
            while time.perf_counter() < ends_s and (question := next(questions, None)) is not None:
                answers.append(await send(question, time.perf_counter()))

        async with asyncio.TaskGroup() as callers:
            for _ in range(self.concurrency):
                callers.create_task(call_in_turn())


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """A load of requests at given times."""

    arrivals_s: Iterable[float]
    """Seconds after the start, ascending."""
    rate: float
    """Requests per second, for the report."""

    async def run(
        self, send: SendQuestion, questions: Iterator[Question], duration_s: float, answers: list[Answer]
    ) -> None:
        """Send each question when it is due, whether or not others are answered."""

        async def call(question: Question, intended_s: float) -> None:
            answers.append(await send(question, intended_s))

        begun_s = time.perf_counter()
        async with asyncio.TaskGroup() as calls:
            # A question is made before it is due, so that making it adds no latency.
            for at_s, question in zip(self.arrivals_s, questions, strict=False):
                if at_s >= duration_s:
                    return
                intended_s = begun_s + at_s
                # It sleeps even when it is late, for 0 s, so that the event loop can read answers.
                await asyncio.sleep(max(0.0, intended_s - time.perf_counter()))
                calls.create_task(call(question, intended_s))


Load = ClosedLoop | OpenLoop


@dataclass(frozen=True, slots=True)
class Served:
    """A server and what it says about itself."""

    target: str
    model_id: str
    dtype: str
    num_stages: int  # of each replica
    num_tensor: int  # ranks of each stage
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
    """Time from the first request to the last answer."""
    ledger: tuple[StageTimes, ...]  # the stages' time meanwhile
    client_cpu_s: float  # the load generator's own
    was_interrupted: bool  # by Ctrl-C


async def _report(answers: Sequence[Answer], begun_s: float, report: Callable[[str], None]) -> None:
    """Say each second what was answered, until this task is cancelled."""
    while True:
        await asyncio.sleep(_REPORT_EVERY_S)
        tokens = sum(answer.num_tokens for answer in answers)
        took_s = time.perf_counter() - begun_s
        report(f"{took_s:.0f} s: {len(answers)} requests answered, with {tokens} tokens")


async def introduce(caller: Caller, target: str) -> Served:
    """Ask the server for its model and stages. Raises CallFailed."""
    model = await caller.model_info()
    topology = await caller.topology()
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
    """Send requests that are not counted. Raises CallFailed if one fails."""
    answers: list[Answer] = []
    questions = map(workload.question, range(-num_requests, 0))
    await ClosedLoop(concurrency).run(caller.send_question, questions, math.inf, answers)
    for answer in answers:
        if not answer.is_ok:
            raise CallFailed(answer.status, f"while warming up: {answer.problem}")


async def _is_cancelled(running: Coroutine[Any, Any, None]) -> bool:
    try:
        await running
    except asyncio.CancelledError:
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
        return True
    return False


async def measure(
    caller: Caller,
    served: Served,
    workload: Workload,
    load: Load,
    until: Until,
    report: Callable[[str], None] = lambda line: None,
) -> Measurement:
    """Do one run, which a Ctrl-C ends early. Raises CallFailed if the server does not answer.

    report: gets a line each second that says what was answered until then.
    """
    numbers = count() if until.num_requests is None else range(until.num_requests)
    questions = map(workload.question, numbers)
    before = read_ledger(await caller.topology())
    cpu_s, begun_s = time.process_time(), time.perf_counter()
    answers: list[Answer] = []
    reporting = asyncio.create_task(_report(answers, begun_s, report))
    running = load.run(caller.send_question, questions, until.duration_s, answers)
    try:
        was_interrupted = await _is_cancelled(running)
    finally:
        reporting.cancel()
    ended_s = max((answer.ended_s for answer in answers), default=begun_s)
    cpu_s = time.process_time() - cpu_s
    ledger = between(before, read_ledger(await caller.topology()))
    duration_s = ended_s - begun_s
    return Measurement(served, load, workload.seed, answers, duration_s, ledger, cpu_s, was_interrupted)
