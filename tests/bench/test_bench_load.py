"""What is asked follows from seed and number alone; and who asks when, of servers that are functions."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from itertools import count, islice, pairwise
from typing import Any

import pytest

from ppserve.bench.caller import OK, Answer, Question
from ppserve.bench.measure import (
    ClosedLoop,
    Lengths,
    Load,
    OpenLoop,
    Until,
    Workload,
    measure,
    poisson_arrivals,
    warm_up,
)
from ppserve.v1 import generation_pb2 as pb
from tests.bench.answers import SERVED

SIZES = Lengths(4, 40), Lengths(8, 8)


def question(number: int) -> Question:
    return Question(number, (1, 2, 3), 4)


class Server:
    """Answers after `turns` turns of the event loop, or when told to; keeps count."""

    def __init__(self, turns: int = 3, gate: asyncio.Event | None = None) -> None:
        self._turns = turns
        self._gate = gate
        self.now = self.most = 0
        self.intended_s: dict[int, float] = {}

    async def send_question(self, asked: Question, intended_s: float) -> Answer:
        self.intended_s[asked.number] = intended_s
        self.now += 1
        self.most = max(self.most, self.now)
        for _ in range(self._turns):
            await asyncio.sleep(0)
        if self._gate is not None:
            await self._gate.wait()
        self.now -= 1
        ended_s = time.perf_counter()
        return Answer(asked, intended_s, ended_s, ((ended_s, 4),), OK)


async def run(server: Server, load: Load, until: Until) -> list[Answer]:
    """All answers, in the order of their questions."""
    answers: list[Answer] = []
    numbers = count() if until.num_requests is None else range(until.num_requests)
    await load.run(server.send_question, map(question, numbers), until.duration_s, answers)
    return sorted(answers, key=lambda answer: answer.question.number)


@pytest.mark.parametrize(("concurrency", "number"), [(1, 20), (3, 20), (8, 20), (8, 3)])
def test_a_closed_loop_keeps_its_callers_busy_and_no_more(concurrency: int, number: int) -> None:
    server = Server()
    answers = asyncio.run(run(server, ClosedLoop(concurrency), Until(number)))
    assert [answer.question.number for answer in answers] == list(range(number))
    assert server.most == min(concurrency, number)


def test_an_open_loop_does_not_wait_for_the_server() -> None:
    async def main() -> tuple[Server, list[Answer]]:
        gate = asyncio.Event()
        server = Server(gate=gate)
        load = OpenLoop([0.0, 0.001, 0.002, 0.003], math.inf)
        running = asyncio.create_task(run(server, load, Until(4)))
        while server.now < 4:  # all four are there, and none was answered
            await asyncio.sleep(0)
        gate.set()
        return server, await running

    server, answers = asyncio.run(main())
    begun_s = server.intended_s[0]
    intended_s = [round(server.intended_s[number] - begun_s, 9) for number in range(4)]
    assert intended_s == [0.0, 0.001, 0.002, 0.003]
    assert all(answer.e2e_s >= 0 for answer in answers)


def test_an_open_loop_ends_with_its_arrivals_or_its_time() -> None:
    server = Server()
    assert len(asyncio.run(run(server, OpenLoop([0.0, 0.001], math.inf), Until(9)))) == 2
    late = OpenLoop([0.0, 0.001, 3600.0], math.inf)
    assert len(asyncio.run(run(server, late, Until(duration_s=1.0)))) == 2


def test_a_closed_loop_ends_with_its_time_and_waits_for_what_is_on_its_way() -> None:
    server = Server(turns=5)
    answers = asyncio.run(run(server, ClosedLoop(2), Until(duration_s=0.02)))
    assert answers
    assert server.now == 0
    assert [answer.question.number for answer in answers] == list(range(len(answers)))


class Known:
    """A server whose answers end at given times after they were asked for; keeps when it was asked for what."""

    def __init__(self, *ends_s: float) -> None:
        self._ends_s = ends_s
        self.read_s: list[float] = []
        self.asked_s: list[float] = []

    async def topology(self) -> pb.GetTopologyResponse:
        self.read_s.append(time.perf_counter())
        return pb.GetTopologyResponse()

    async def send_question(self, asked: Question, intended_s: float) -> Answer:
        self.asked_s.append(time.perf_counter())
        ended_s = self.asked_s[0] + self._ends_s[asked.number]
        return Answer(asked, intended_s, ended_s, ((ended_s, 4),), OK)


@pytest.mark.parametrize("ends_s", [(5.0, 9.0, 2.0), (9.0, 5.0, 2.0), (2.0, 5.0, 9.0)])
def test_a_run_lasts_from_its_first_request_to_its_last_answer(ends_s: tuple[float, ...]) -> None:
    """The answers may end in any order, and neither the readings of the ledger nor what follows count."""
    server: Any = Known(*ends_s)
    workload = Workload(*SIZES, 50)
    measured = asyncio.run(measure(server, SERVED, workload, ClosedLoop(1), Until(3)))
    (before_s, _), (first_s, *_) = server.read_s, server.asked_s
    assert 9.0 <= measured.duration_s <= 9.0 + first_s - before_s


def test_requests_before_the_load_are_none_of_its_own() -> None:
    server: Any = Server()
    asyncio.run(warm_up(server, Workload(*SIZES, 50), 3, 2))
    assert (sorted(server.intended_s), server.most) == ([-3, -2, -1], 2)


def test_lengths_are_what_they_say() -> None:
    rng = random.Random(0)
    assert [Lengths.parse("128").draw(rng) for _ in range(3)] == [128] * 3
    assert {Lengths.parse("uniform:2:5").draw(rng) for _ in range(200)} == {2, 3, 4, 5}


@pytest.mark.parametrize("text", ["", "0", "-3", "1.5", "uniform:5", "uniform:9:3", "uniform:0:3", "normal:1:2"])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="is not a length"):
        Lengths.parse(text)


def test_a_question_depends_on_seed_and_number_alone() -> None:
    workload = Workload(*SIZES, 50, 3)
    forwards = [workload.question(number) for number in range(-5, 20)]
    backwards = [Workload(*SIZES, 50, 3).question(number) for number in reversed(range(-5, 20))]
    assert forwards == backwards[::-1]
    assert len({question.prompt_ids for question in forwards}) == 25
    other = [Workload(*SIZES, 50, 4).question(number) for number in range(-5, 20)]
    assert all(a.prompt_ids != b.prompt_ids for a, b in zip(forwards, other, strict=True))
    assert all(4 <= len(question.prompt_ids) <= 40 and question.max_tokens == 8 for question in forwards)


def test_arrivals_are_a_poisson_process() -> None:
    gaps = [b - a for a, b in pairwise(islice(poisson_arrivals(20.0, 1), 4000))]
    assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=0.15)
    assert list(islice(poisson_arrivals(20.0, 1), 9)) == list(islice(poisson_arrivals(20.0, 1), 9))
    assert list(islice(poisson_arrivals(20.0, 1), 9)) != list(islice(poisson_arrivals(20.0, 2), 9))
    assert list(islice(poisson_arrivals(float("inf"), 1), 3)) == [0.0, 0.0, 0.0]
