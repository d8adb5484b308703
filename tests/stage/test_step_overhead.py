"""What a rank computes around a step: measured where it serves, and never in the way of a start."""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ppserve.core.plan import StepPlan, StepResult, StepStamps
from ppserve.errors import UsageError
from ppserve.stage import step_overhead
from ppserve.stage.calibrate import ExpectedWorkload

PLAN, _ = ExpectedWorkload(prompt=32, new=64).step(1024)
_NO_SECONDS = 0.0


class HelpedStage:
    """Its steps are computed by another thread, for 20 ms."""

    def __init__(self) -> None:
        backend = SimpleNamespace(precision=SimpleNamespace(hidden=torch.float32), device=torch.device("cpu"))
        self.model = SimpleNamespace(arch=SimpleNamespace(width=8), backend=backend)
        self.transport: Any = None
        self.received: list[tuple[int, ...]] = []

    def step(self, plan: StepPlan, planned_ns: int) -> Any:
        if self.transport is not None:
            self.received.append(tuple(self.transport.receive(plan).shape))
        helper = threading.Thread(target=compute_for, args=(0.02,))
        helper.start()
        helper.join()
        return SimpleNamespace(result=StepResult(plan.epoch, plan.step_id, 0, StepStamps(0, 0, 0, 0, 0, 0)))


def compute_for(seconds: float) -> None:
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


def measuring(where: str, stage: HelpedStage) -> AbstractContextManager[step_overhead.Measure]:
    helped: Any = stage
    if where == "middle":
        return step_overhead.on_middle_stage(helped, PLAN)
    return step_overhead.on_lone_stage(helped, PLAN, lambda: _NO_SECONDS)


@pytest.mark.parametrize("where", ["lone", "middle"])
def test_what_a_second_thread_computes_is_not_around_a_step(where: str) -> None:
    with measuring(where, stage := HelpedStage()) as measure:
        assert all(0 < measure() < 0.01 for _ in range(2))
    assert stage.received == [(PLAN.num_tokens, 8)] * (6 if where == "middle" else 0)


def test_what_the_head_takes_is_not_around_a_step() -> None:
    helped: Any = HelpedStage()
    with step_overhead.on_lone_stage(helped, PLAN, lambda: 1.0) as measure:
        assert measure() == 0.0


def test_in_the_middle_the_next_plan_is_there_before_the_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three plans a lone stage makes three steps; the other has heard the third before it ends the second."""
    three = "ours.sendall(plan * 3)\nimport time\ntime.sleep(3600)"
    monkeypatch.setattr(
        step_overhead, "_HEAD", step_overhead._HEAD[: step_overhead._HEAD.index("ours.sendall")] + three
    )
    monkeypatch.setattr(step_overhead, "_HEARD_WITHIN_S", 0.5)
    with measuring("lone", HelpedStage()) as measure:
        assert measure() > 0
    with measuring("middle", stage := HelpedStage()) as measure, pytest.raises(UsageError, match="sent none in"):
        measure()
    assert len(stage.received) == 2


@pytest.mark.parametrize(
    ("does", "within_s"),
    [("raise SystemExit", 3600.0), ("import time; time.sleep(3600)", 0.2)],
    ids=["it ends", "it is silent"],
)
def test_a_process_that_sends_no_plans_does_not_hold_a_start(
    monkeypatch: pytest.MonkeyPatch, does: str, within_s: float
) -> None:
    """One that ends is not waited for."""
    monkeypatch.setattr(step_overhead, "_HEAD", does)
    monkeypatch.setattr(step_overhead, "_HEARD_WITHIN_S", within_s)
    problem = pytest.raises(UsageError, match=f"has ended, or sent none in {within_s:.0f} s")
    with problem, measuring("lone", HelpedStage()) as measure:
        measure()
