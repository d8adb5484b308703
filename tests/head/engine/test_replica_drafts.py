"""The replica and draft tokens: whom it tells of steps in vain, and where nothing is drafted."""

from __future__ import annotations

import pytest

from ppserve import wire
from ppserve.core.plan import SPECULATIVE
from ppserve.core.request import Request, SamplingParams, StopConditions
from tests.head.engine.replica_rig import Rig, finished, formed


def repeats(rig: Rig) -> None:
    """Submits a prompt of one token several times, which is drafted to follow again."""
    rig.ask(Request("r", (5,) * 6, StopConditions(6, ignore_eos=True), SamplingParams()))


def test_every_rank_hears_at_once_of_a_step_that_is_doomed() -> None:
    rig = formed(speculate=1)
    repeats(rig)
    prompt, drafted = rig.refill()
    assert drafted.phase == SPECULATIVE
    rig.control.sent.clear()
    rig.compute(prompt)  # it draws token 3
    cancels = [(rank, message) for rank, message in rig.control.sent if isinstance(message, wire.Cancel)]
    assert cancels == [(rank, wire.Cancel((drafted.step_id,))) for rank in rig.ranks]


def test_every_rank_hears_of_steps_that_are_void_before_the_plan_of_the_request_for_which_they_make_way() -> None:
    rig = formed(4, speculate=1, max_num_seqs=2)
    for name, prompt, max_tokens in (("drafted", (3,) * 6, 9), ("short", (7, 8), 1), ("waiting", (1, 2), 1)):
        rig.ask(Request(name, prompt, StopConditions(max_tokens, ignore_eos=True), SamplingParams()))
    both, *drafted = rig.refill()
    assert [plan.phase for plan in drafted] == [SPECULATIVE] * 3
    assert finished(rig.compute(both)) == ["short"]
    (prompt_of_waiting,) = rig.refill()
    cancelled_steps = tuple(plan.step_id for plan in drafted[1:])
    for rank in rig.ranks:
        cancel, plan = (message for to, message in rig.control.sent if to == rank)
        assert cancel == wire.Cancel(cancelled_steps)
        assert isinstance(plan, wire.Plan)
        assert plan.plan.step_id == prompt_of_waiting.step_id


@pytest.mark.parametrize(("why_not", "num_steps"), [("", 2), ("rows differ", 1)])
def test_nothing_is_guessed_where_the_self_test_failed(
    why_not: str, num_steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(speculate=1)
    rig.form(why_not)
    repeats(rig)
    assert len(rig.refill()) == num_steps
    assert ("nothing is drafted: rows differ" in caplog.text) == bool(why_not)
