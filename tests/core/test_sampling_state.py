"""Long draws travel once. That every plan arrives as it was made, the scheduler's walks check with every step."""

from __future__ import annotations

from ppserve.core.plan import Draw, Slice, StepPlan
from ppserve.core.request import SamplingParams
from ppserve.core.sampling_state import NOTHING, SamplingDecoder, SamplingEncoder

LONG = Draw(SamplingParams(logit_bias=tuple((i, 1.0) for i in range(1000))))


def decode(sequence_id: int, end: int, draw: Draw = LONG) -> StepPlan:
    return StepPlan(1, end, 0, (Slice(sequence_id, end - 1, (end,), (0,), draw),))


def test_a_draw_is_told_at_the_first_step_of_an_epoch_and_no_more() -> None:
    for _epoch in range(2):
        teller = SamplingEncoder()
        told = [teller.tell(decode(5, end), {5})[1].draws for end in (1, 2, 3)]
        assert told == [((0, LONG),), ((0, None),), ((0, None),)]


def test_a_short_draw_stays_where_it_is() -> None:
    plan = decode(5, 1, Draw(SamplingParams(seed=3)))
    assert SamplingEncoder().tell(plan, {5}) == (plan, NOTHING)
    assert SamplingDecoder().restore(plan, NOTHING) is plan


def test_sequences_that_ended_are_forgotten() -> None:
    teller, memory = SamplingEncoder(), SamplingDecoder()
    most = 0
    for sequence_id in range(1000):
        plan = decode(sequence_id, 1)
        assert memory.restore(*teller.tell(plan, {sequence_id})) == plan
        most = max(most, len(memory))
    assert 10 < most < 100


def test_a_sequence_that_was_elsewhere_is_told_again_where_tokens_are_missing() -> None:
    teller, memory = SamplingEncoder(), SamplingDecoder()
    params = SamplingParams(repetition_penalty=1.5)

    def step(start: int, end: int) -> StepPlan:
        tokens = tuple(range(100, 100 + end))
        draw = Draw(params, prompt_ids=tokens[:2], output_ids=tokens[2:])
        return StepPlan(1, end, 0, (Slice(5, start, tokens[start:], (0,), draw),))

    # Three tokens here, nine elsewhere; of these eight are in blocks that another sequence has filled.
    for plan, is_told in ((step(0, 2), True), (step(2, 3), False), (step(8, 12), True), (step(12, 13), False)):
        bare, told = teller.tell(plan, {5})
        assert (told.draws[0][1] is not None) == is_told
        assert memory.restore(bare, told) == plan
