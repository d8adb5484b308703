"""Long draws travel once. That every plan arrives as it was made, the scheduler's walks check with every step."""

from __future__ import annotations

from ppserve.core.plan import Draw, Slice, StepPlan
from ppserve.core.request import SamplingParams
from ppserve.core.sampling_state import SamplingDecoder, SamplingEncoder, SamplingUpdate

LONG = Draw(SamplingParams(logit_bias=tuple((i, 1.0) for i in range(1000))))


def decode(sequence_id: int, end: int, draw: Draw = LONG) -> StepPlan:
    return StepPlan(1, end, 0, (Slice(sequence_id, end - 1, (end,), (0,), draw),))


def test_a_draw_is_sent_with_the_first_step_of_an_epoch_and_no_more() -> None:
    for _epoch in range(2):
        encoder = SamplingEncoder()
        sent = [encoder.encode(decode(5, end), {5})[1].first_draws for end in (1, 2, 3)]
        assert sent == [((5, LONG),), (), ()]


def test_a_short_draw_stays_where_it_is() -> None:
    plan = decode(5, 1, Draw(SamplingParams(seed=3)))
    assert SamplingEncoder().encode(plan, {5}) == (plan, SamplingUpdate())
    assert SamplingDecoder().decode(plan, SamplingUpdate()) is plan


def test_sequences_that_ended_are_forgotten() -> None:
    encoder, decoder = SamplingEncoder(), SamplingDecoder()
    for sequence_id in range(100):
        plan = decode(sequence_id, 1)
        assert decoder.decode(*encoder.encode(plan, {sequence_id})) == plan
        assert len(decoder) == 1


def test_the_history_grows_with_the_slices() -> None:
    encoder, decoder = SamplingEncoder(), SamplingDecoder()
    tokens, params = tuple(range(100, 120)), SamplingParams(repetition_penalty=1.5)
    # The first slice is the end of a prompt of four tokens; the third has two draft tokens, of which one is right.
    for start, end, num_drafts in ((2, 4, 0), (4, 5, 0), (5, 8, 2), (7, 8, 0)):
        known = end - num_drafts
        draw = Draw(params, prompt_ids=tokens[:4], output_ids=tokens[4:known])
        plan = StepPlan(1, end, 0, (Slice(5, start, tokens[start:end], (0,), draw, (), 0, num_drafts),))
        assert decoder.decode(*encoder.encode(plan, {5})) == plan
