"""The draft model's process, started for real: it answers, and nobody minds its end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

import pytest

from ppserve.core.plan import Draw, Slice
from ppserve.core.request import SamplingParams
from ppserve.head.engine.draft_process import DraftProcess

pytestmark = pytest.mark.slow

QUESTION = Slice(1, 0, (5, 6, 7), (), Draw(SamplingParams(temperature=0)))


@pytest.fixture
def process() -> Iterator[DraftProcess]:
    process = DraftProcess("builtin", "tiny")
    yield process
    process.end()


def until(true: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline_s


def answered(process: DraftProcess) -> tuple[int, ...]:
    answers: list[tuple[int, ...]] = []
    until(lambda: answers.extend(filter(None, [process.answer(wait=True)])) or answers)
    return answers[0]


def test_it_answers_until_it_is_gone(process: DraftProcess) -> None:
    until(lambda: process.answer(wait=True) or process.max_positions)
    process.ask(QUESTION, 4)
    first = answered(process)
    assert len(first) == 4
    process.ask(Slice(1, 3, first[:2], (), QUESTION.draw), 2)
    assert answered(process) == first[2:], "what it holds is continued"
    process._process.kill()
    process._process.wait()
    process.ask(QUESTION, 4)
    assert process.answer(wait=True) is None
    assert process.max_positions == 0


def test_one_that_does_not_read_is_not_waited_for() -> None:
    process = DraftProcess("builtin", "tiny", (sys.executable, "-c", "import time; time.sleep(600)"))
    process.ask(Slice(1, 0, tuple(range(30_000, 530_000)), (), QUESTION.draw), 4)
    assert process.answer(wait=True) is None
    assert process.max_positions == 0
    process._process.wait(timeout=60)  # it takes no memory any more
    process.end()


def test_one_that_cannot_start_only_means_no_guesses() -> None:
    process = DraftProcess("builtin", "tiny", (sys.executable, "-c", "raise SystemExit(2)"))
    process._process.wait()
    until(lambda: process._is_lost or process.max_positions)
    assert process.max_positions == 0
    process.end()
