"""Draft tokens by a draft model that is asked over a channel."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ppserve.core.plan import Slice
from ppserve.core.request import Request, SamplingParams, StopConditions
from ppserve.core.scheduling.draft_model import MOST_DRAFTED, NUM_SLOTS, DraftModel
from ppserve.core.scheduling.drafter import Drafter


class Counting:
    """A channel to a model that counts on from the last token. delay: how many calls an answer takes.

    It checks that every question continues what its slot holds.
    """

    def __init__(self, delay: int = 0) -> None:
        self.max_positions = 100
        self.pieces: list[Slice] = []
        self._held: dict[int, list[int]] = {}
        self._delay, self._calls = delay, 0
        self._open: tuple[int, ...] | None = None
        self.waits: list[bool] = []

    def ask(self, piece: Slice, count: int) -> None:
        assert self._open is None, "one question at a time"
        assert count > 0
        held = self._held.setdefault(piece.sequence_id, [])
        assert piece.start <= len(held)
        held[piece.start :] = piece.token_ids
        assert all(after == before + 1 for before, after in pairwise(held)), "not what the answer's tokens are"
        self._open = tuple(range(held[-1] + 1, held[-1] + 1 + count))
        held += self._open[:-1]
        self.pieces.append(piece)
        self._calls = 0

    def answer(self, *, wait: bool) -> tuple[int, ...] | None:
        self._calls += 1
        self.waits.append(wait)
        if self._calls <= self._delay:
            return None
        answer, self._open = self._open, None
        return answer


def answers_of(model: DraftModel, count: int) -> list[Drafter]:
    request = Request("r", (0,), StopConditions(99), SamplingParams(seed=1))
    return [model.drafter(request, index) for index in range(count)]


def test_one_question_gives_several_guesses() -> None:
    channel = Counting()
    (drafter,) = answers_of(DraftModel(channel), 1)
    known, draft_tokens = [0, 1, 2], []
    while (draft_token := drafter.draft_token(known, draft_tokens)) is not None:
        draft_tokens.append(draft_token.token_id)
    assert draft_tokens == list(range(3, 3 + len(draft_tokens)))
    assert 2 < len(draft_tokens) <= MOST_DRAFTED
    assert len(channel.pieces) == 1


def test_the_first_token_of_an_answer_does_not_wait_for_what_follows_it() -> None:
    """Both are of one turn of the engine."""
    channel = Counting()
    first, second = answers_of(DraftModel(channel), 2)
    for drafter in (first, second):
        channel.waits.clear()
        drafter.draft_token([0, 1, 2], [])
        assert channel.waits == [False]
        drafter.draft_token(list(range(3 + MOST_DRAFTED)), [])
        assert channel.waits == [False, True]


def test_after_right_guesses_only_new_tokens_are_sent() -> None:
    channel = Counting()
    (drafter,) = answers_of(DraftModel(channel), 1)
    for length in range(3, 90):
        draft_token = drafter.draft_token(list(range(length)), [])
        assert draft_token is not None
        assert draft_token.token_id == length
    assert max(len(piece.token_ids) for piece in channel.pieces[1:]) == 1
    assert draft_token.probability > 0.95, "it has learnt that this model is right"


def test_after_a_wrong_guess_the_tokens_from_there_on_are_sent_again() -> None:
    class Wrong(Counting):
        def answer(self, *, wait: bool) -> tuple[int, ...] | None:
            answer = super().answer(wait=wait)
            return answer and (*answer[:-1], 0)

    channel = Wrong()
    (drafter,) = answers_of(DraftModel(channel), 1)
    chances = []
    for length in range(3, 90):
        if (draft_token := drafter.draft_token(list(range(length)), [])) is not None:
            chances.append(draft_token.probability)
    assert max(len(piece.token_ids) for piece in channel.pieces[1:]) <= 2
    assert 0.2 < chances[-1] < 0.95


def test_a_model_that_is_always_wrong_is_not_asked_for_ever() -> None:
    channel = Counting()
    channel.answer = lambda *, wait: (7,)  # type: ignore[method-assign]
    channel.ask = lambda piece, _count: channel.pieces.append(piece)  # type: ignore[method-assign]
    drafter, *others = answers_of(DraftModel(channel), NUM_SLOTS + 1)
    assert drafter.draft_token([0, 0], []) is not None
    assert [other.draft_token([0, 0], []) is None for other in others] == [False] * (NUM_SLOTS - 1) + [True]
    draft_tokens = [drafter.draft_token([0] * length, []) for length in range(3, 90)]
    assert draft_tokens[-1] is None
    assert len(channel.pieces) < 40 + NUM_SLOTS
    assert others[-1].draft_token([0, 0], []) is not None, "its slot is free"


@pytest.mark.parametrize("delay", [1, 2, 5])
def test_late_answers_are_used_as_far_as_they_are_true(delay: int) -> None:
    (drafter,) = answers_of(DraftModel(Counting(delay)), 1)
    draft_tokens = [drafter.draft_token(list(range(length)), []) for length in range(3, 90)]
    made = [(length, draft_token) for length, draft_token in enumerate(draft_tokens, 3) if draft_token is not None]
    assert all(draft_token.token_id == length for length, draft_token in made)
    assert len(made) > 10


def test_an_answer_to_what_was_guessed_wrongly_is_dropped() -> None:
    channel = Counting(delay=1)
    (drafter,) = answers_of(DraftModel(channel), 1)
    assert drafter.draft_token([0, 1, 2], []) is None
    draft_token = drafter.draft_token([0, 1, 2], [])
    assert draft_token is not None
    assert draft_token.token_id == 3
    channel.max_positions = 0
    assert drafter.draft_token([0, 1, 2, 9], []) is None, "4 was said to follow 3, not 9"


def test_more_answers_than_slots_go_without_until_one_ends() -> None:
    drafters = answers_of(DraftModel(Counting()), NUM_SLOTS + 1)
    *first, last = (drafter.draft_token([0, 1, 2], []) for drafter in drafters)
    assert None not in first
    assert last is None
    del drafters[0]
    assert drafters[-1].draft_token([0, 1, 2], []) is not None


def test_a_draft_model_that_is_gone_guesses_nothing() -> None:
    channel = Counting()
    channel.max_positions = 0
    (drafter,) = answers_of(DraftModel(channel), 1)
    assert drafter.draft_token([0, 1, 2], []) is None


def test_nothing_is_guessed_beyond_its_context() -> None:
    (drafter,) = answers_of(DraftModel(Counting()), 1)
    known, draft_tokens = list(range(97)), []
    while (draft_token := drafter.draft_token(known, draft_tokens)) is not None:
        draft_tokens.append(draft_token.token_id)
    assert len(draft_tokens) == 3
