"""A sequence: one table of transitions, slices in order, draws and ends by the request's conditions."""

from __future__ import annotations

import itertools

import pytest

from ppserve.core.request import FinishReason, OutputOptions, Request, SamplingParams, StopConditions
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.core.scheduling.sequence import NEXT, InvalidTransition, Sequence, SequenceStatus

EOS_ID = 7
CONFIG = SchedulerConfig(1, block_size=2, eos_ids=(EOS_ID,))


def sequence_for(stop: StopConditions | None = None, **fields: object) -> Sequence:
    request = Request("r", (1, 2, 3, 4, 5), stop or StopConditions(4), **fields)  # type: ignore[arg-type]
    sequence = Sequence(0, request, 0, CONFIG)
    sequence.start(0)
    sequence.use_blocks((10, 11, 12, 13), 0)
    return sequence


@pytest.mark.parametrize(("old", "new"), list(itertools.product(SequenceStatus, SequenceStatus)))
def test_only_the_moves_of_the_table_are_made(old: SequenceStatus, new: SequenceStatus) -> None:
    sequence = Sequence(0, sequence_for().request, 0, CONFIG)
    sequence.status = old
    if new in NEXT[old]:
        sequence.move_to(new)
        assert sequence.status is new
    else:
        with pytest.raises(InvalidTransition):
            sequence.move_to(new)
        assert sequence.status is old


def test_slices_follow_one_another_and_only_the_last_draws() -> None:
    sequence = sequence_for()
    first, second = sequence.schedule(3), sequence.schedule(2)
    assert (first.start, first.token_ids, first.block_table, first.draw) == (0, (1, 2, 3), (10, 11), None)
    assert (second.start, second.token_ids, second.block_table) == (3, (4, 5), (10, 11, 12))
    assert second.draw is not None
    assert sequence.remaining == 0
    with pytest.raises(AssertionError):
        sequence.schedule(1)


def test_a_draw_with_penalties_carries_the_history() -> None:
    sequence = sequence_for(sampling=SamplingParams(frequency_penalty=0.5))
    sequence.schedule(5)
    sequence.commit_token(9)
    draw = sequence.schedule(1).draw
    assert draw is not None
    assert (draw.prompt_ids, draw.output_ids) == ((1, 2, 3, 4, 5), (9,))


@pytest.mark.parametrize(("ignore_eos", "banned"), [(False, (3, EOS_ID)), (True, (3,))])
def test_min_tokens_bans_what_would_end_the_answer(ignore_eos: bool, banned: tuple[int, ...]) -> None:
    sequence = sequence_for(StopConditions(4, min_tokens=1, stop_token_ids=(3,), ignore_eos=ignore_eos))
    draw = sequence.schedule(5).draw
    assert draw is not None
    assert (draw.banned, draw.banned_before) == (banned, 6), "the first token of the answer is at position 5"


@pytest.mark.parametrize(
    ("stop", "limited", "token_id", "finish"),
    [
        (StopConditions(4), False, EOS_ID, FinishReason.EOS),
        (StopConditions(4, ignore_eos=True), False, EOS_ID, None),
        (StopConditions(4, ignore_eos=True, stop_token_ids=(EOS_ID,)), False, EOS_ID, FinishReason.STOP_TOKEN),
        (StopConditions(4, stop_token_ids=(3,)), False, 3, FinishReason.STOP_TOKEN),
        (StopConditions(1), False, 9, FinishReason.MAX_TOKENS),
        (StopConditions(1), True, 9, FinishReason.CONTEXT_LENGTH),
        (StopConditions(1), True, EOS_ID, FinishReason.EOS),
        (StopConditions(4), False, 9, None),
    ],
)
def test_why_an_answer_ends(
    stop: StopConditions, limited: bool, token_id: int, finish: FinishReason | None
) -> None:
    sequence = sequence_for(stop, limited_by_context=limited)
    assert sequence.commit_token(token_id) is finish


def test_targets_are_the_tokens_that_follow_in_the_prompt() -> None:
    sequence = sequence_for(output=OutputOptions(prompt_logprobs=2))
    first, second = sequence.schedule(2), sequence.schedule(3)
    assert (first.targets, first.num_prompt_logprobs) == ((2, 3), 2)
    assert second.targets == (4, 5)
    assert len(second.targets) == len(second.token_ids) - 1
