"""A process that takes too much ends, its parent learns why, and the next question gets another process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ppserve.process.limited import LimitedProcesses, OutOfMemory, OutOfTime, serve

KEPT: list[bytes] = []
NICENESS = 3


def _begin(line: str) -> Callable[[str], str]:
    return lambda question: _answer(line.strip(), question.strip())


def _answer(begun: str, question: str) -> str:
    while question == "run on":
        pass
    if question == "grow":
        return str(len(bytearray(4 << 30)))
    if question == "keep":
        KEPT.append(b"x" * (300 << 20))
    if question == "niceness":
        return str(os.getpriority(os.PRIO_PROCESS, 0))
    if question == "exit":
        sys.exit(0)
    return f"{begun} {question}"


@pytest.fixture
def processes() -> Iterator[LimitedProcesses]:
    made = LimitedProcesses(__name__, "hello")
    yield made
    made.close()


def test_questions_are_answered_by_one_process(processes: LimitedProcesses) -> None:
    assert processes.ask("a") == "hello a\n"
    idle = [*processes._idle]
    assert processes.ask("b") == "hello b\n"
    assert processes._idle == idle


def test_it_is_less_urgent_than_its_parent(processes: LimitedProcesses) -> None:
    niceness = int(processes.ask("niceness"))
    assert niceness == min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
    autogroup = Path(f"/proc/{processes._idle[0].pid}/autogroup")
    if autogroup.exists():
        assert autogroup.read_text().endswith(f" nice {NICENESS}\n")


@pytest.mark.parametrize(
    ("question", "error"), [("run on", OutOfTime), ("grow", OutOfMemory), ("exit", OutOfMemory)]
)
def test_a_process_that_takes_too_much_ends(
    processes: LimitedProcesses, question: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        processes.ask(question)
    assert processes._idle == []
    assert processes.ask("a") == "hello a\n"


def test_a_process_that_keeps_much_memory_ends_when_it_has_answered(processes: LimitedProcesses) -> None:
    assert processes.ask("keep") == "hello keep\n"
    assert processes._idle == []


def test_closing_ends_the_idle_processes(processes: LimitedProcesses) -> None:
    processes.ask("a")
    [process] = processes._idle
    processes.close()
    assert process.returncode is not None


if __name__ == "__main__":
    serve(_begin, 1.0, 1 << 30, NICENESS)
