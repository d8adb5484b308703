"""Long draws travel once. That every plan arrives as it was made, the scheduler's walks check with every step."""

from __future__ import annotations

from ppserve.core.plan import Draw, Slice, StepPlan
from ppserve.core.request import SamplingParams
from ppserve.core.sampling_state import SamplingDecoder, SamplingEncoder, SamplingUpdate

LONG = Draw(SamplingParams(logit_bias=tuple((i, 1.0) for i in range(1000))))


def test_a_draw_is_sent_with_the_first_step_of_an_epoch_and_no_more() -> None:
    plans = [StepPlan(1, end, 0, (Slice(5, end - 1, (end,), (0,), LONG),)) for end in (1, 2, 3)]
    for _epoch in range(2):
        encoder = SamplingEncoder()
        assert [encoder.encode(plan, {5})[1].first_draws for plan in plans] == [((5, LONG),), (), ()]


def test_a_short_draw_stays_where_it_is() -> None:
    plan = StepPlan(1, 1, 0, (Slice(5, 0, (1,), (0,), Draw(SamplingParams(seed=3))),))
    assert SamplingEncoder().encode(plan, {5}) == (plan, SamplingUpdate())
    assert SamplingDecoder().decode(plan, SamplingUpdate()) is plan
