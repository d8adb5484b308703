"""The replica and draft tokens: where none are made."""

from __future__ import annotations

import pytest

from ppserve.core.request import Request, SamplingParams, StopConditions
from tests.head.engine.replica_rig import Rig


@pytest.mark.parametrize(("why_not", "num_rows"), [("", 2), ("rows differ", 1)])
def test_no_draft_tokens_where_the_self_test_failed(
    why_not: str, num_rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(speculate=1)
    rig.form(why_not)
    rig.ask(Request("r", (3,) * 6, StopConditions(6, ignore_eos=True), SamplingParams()))
    (prompt,) = rig.refill()
    rig.compute(prompt)  # it draws token 3
    (plan,) = rig.refill()
    assert plan.num_tokens == num_rows
    assert ("rows differ" in caplog.text) == bool(why_not)
