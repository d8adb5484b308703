"""The draft model's process, started for real: it answers, and nobody minds its end."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ppserve.core.plan import Draw, Slice
from ppserve.core.request import SamplingParams
from ppserve.core.scheduling.drafter import Interrupted
from ppserve.head.engine import draft_process
from ppserve.head.engine.draft_process import WAIT_S, DraftProcess
from tests.head.engine.control_rig import listening
from tools.make_random_gpt2 import Shape, write_checkpoint

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
    assert not process.refused()
    assert process.max_positions > 0
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


def test_ctrl_c_while_it_imports_does_not_end_it() -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    process = DraftProcess("builtin", "tiny", (sys.executable, "-c", program))
    assert process._process.wait(60) == 0
    process.end()


def test_nothing_is_waited_for_when_a_request_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_process, "WAIT_S", 20.0)
    with listening() as control:
        never = (sys.executable, "-c", "import time; time.sleep(600)")
        process = DraftProcess("builtin", "tiny", never, [control.woken_file])
        process.ask(QUESTION, 1)
        control.wake()
        began_s = time.monotonic()
        with pytest.raises(Interrupted):
            process.answer(wait=True)
        assert time.monotonic() - began_s < 10.0
        process.end()


def test_what_is_drawn_when_a_request_arrives_is_the_answer() -> None:
    """It may need the core. The process hears of both at once here, and begins with the question."""
    with listening() as control:
        process = DraftProcess("builtin", "tiny", wakes=[control.woken_file])
        assert not process.refused()
        until(lambda: process.max_positions)
        os.kill(process._process.pid, signal.SIGSTOP)
        process.ask(QUESTION, 100)
        control.wake()
        with pytest.raises(Interrupted):
            process.answer(wait=True)
        os.kill(process._process.pid, signal.SIGCONT)
        control.poll(0.0)
        assert len(first := answered(process)) == 1
        process.ask(QUESTION, 4)
        again = answered(process)
        assert (again[:1], len(again)) == (first, 4), "the next one is answered in full"
        process.end()


class Slow(DraftProcess):
    """Every answer takes 8 ms. waits: how long the engine would have waited for each."""

    def __init__(self) -> None:
        self.waits: list[float] = []
        super().__init__("builtin", "tiny", (sys.executable, "-c", "import time; time.sleep(600)"))

    def _listen(self, timeout_s: float) -> None:
        self.waits.append(timeout_s)
        time.sleep(0.008)
        self._answers.append((1,))


def test_the_engine_waits_for_all_answers_of_a_step_no_longer_than_for_one() -> None:
    process = Slow()
    for slot in (0, 1, 2, 3, 0, 0):
        process.ask(Slice(slot, 0, (5,), (), QUESTION.draw), 1)
        assert process.answer(wait=True) == (1,)
    process.end()
    first, second, third, fourth, again, alone = process.waits
    assert first == alone == WAIT_S
    assert (second <= WAIT_S - 0.008, third <= WAIT_S - 0.016, fourth, again) == (True, True, 0, 0)


def test_one_of_another_vocabulary_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The command looks into directories only: a hub id or a `.pt` is opened here first."""
    write_checkpoint(tmp_path, Shape(num_layers=1, width=16, num_heads=1, max_positions=32, vocab_size=300))
    process = DraftProcess(str(tmp_path), "tiny")
    assert process.refused()
    assert "ppserve: error: --draft-model: knows 300 tokens, and the model 1280" in capfd.readouterr().err
    process.end()


def test_one_that_cannot_start_only_means_no_guesses() -> None:
    process = DraftProcess("builtin", "tiny", (sys.executable, "-c", "raise SystemExit(1)"))
    assert not process.refused()
    process._process.wait()
    until(lambda: process._is_lost or process.max_positions)
    assert process.max_positions == 0
    process.end()
