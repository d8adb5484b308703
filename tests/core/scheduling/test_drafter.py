"""The drafter that looks into the sequence itself."""

from __future__ import annotations

import pytest

from ppserve.core.scheduling.drafter import LONGEST, MOST_LEARNT, DraftToken, PromptLookup


def drafted(token_ids: list[int], draft_tokens: tuple[int, ...] = ()) -> int | None:
    draft_token = PromptLookup().draft_token(token_ids, draft_tokens)
    return None if draft_token is None else draft_token.token_id


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        ([], None),
        ([5], None),
        ([1, 2, 3], None),
        ([1, 1], 1),
        ([7, 8, 9, 7], 8),
        ([1, 2, 3, 4, 9, 2, 3], 4),
        ([1, 2, 5, 1, 2, 6, 1, 2], 6),
        ([1, 2, 3, 50, 9, 2, 3, 60, 0, 1, 2, 3], 50),
    ],
    ids=["nothing", "one", "new", "twice", "one match", "two match", "latest", "longest before latest"],
)
def test_what_followed_the_longest_and_latest_match(token_ids: list[int], expected: int | None) -> None:
    assert drafted(token_ids) == expected


def test_a_long_prompt_is_learnt_in_parts() -> None:
    token_ids = [number % 300 for number in range(3 * MOST_LEARNT)]
    drafter = PromptLookup()
    assert [drafter.draft_token(token_ids, ()) for _ in range(2)] == [None, None]
    draft_token = drafter.draft_token(token_ids, ())
    assert draft_token is not None
    assert draft_token.token_id == 3 * MOST_LEARNT % 300
    assert drafter.draft_token([*token_ids, draft_token.token_id], ()) is not None


def test_guesses_count_as_the_end_of_the_sequence() -> None:
    text = [1, 2, 3, 4, 5, 1, 2]
    assert [drafted(text, (3, 4)[:n]) for n in range(3)] == [3, 4, 5]


def test_a_guess_leaves_no_trace() -> None:
    drafter = PromptLookup()
    drafter.draft_token([1, 2, 3, 1], (2, 9, 9, 9))
    assert drafter.draft_token([1, 2, 3, 1, 2], ()) == PromptLookup().draft_token([1, 2, 3, 1, 2], ())


def test_ends_of_different_lengths_are_different() -> None:
    """Token 0 is a token like any other, also in front."""
    assert drafted([0, 5, 1, 5]) == 1
    assert drafted([9, 0, 0, 5, 1, 7, 5]) == 1


def test_experience_raises_and_lowers_the_probability() -> None:
    def probability(token_ids: list[int]) -> float:
        draft_token = PromptLookup().draft_token(token_ids, ())
        assert isinstance(draft_token, DraftToken)
        return draft_token.probability

    assert probability([1, 2, 3] * 30) > 0.9
    liar = [token for n in range(100, 160) for token in (1, 2, 3, n)]
    assert probability([*liar, 1, 2, 3]) < 0.2


def test_experience_is_gained_while_nothing_is_asked() -> None:
    asked, silent = PromptLookup(), PromptLookup()
    text = [n * n % 7 for n in range(200)]
    for end in range(1, 200):
        asked.draft_token(text[:end], ())
    assert asked.draft_token(text, ()) == silent.draft_token(text, ())


class Counting(list[int]):
    """Counts the tokens that are looked at."""

    num_read = 0

    def __getitem__(self, place):  # type: ignore[no-untyped-def, override]
        found = super().__getitem__(place)
        self.num_read += len(found) if isinstance(found, list) else 1
        return found


def test_time_and_memory_per_token_are_constant() -> None:
    drafter, text = PromptLookup(), Counting(n * 7919 % 50257 for n in range(5_000))
    for _ in range(5_000 // MOST_LEARNT + 1):
        drafter.draft_token(text, ())
    assert len(drafter._followers) <= LONGEST * len(text)
    text.num_read = 0
    drafter.draft_token(text, ())
    assert text.num_read <= LONGEST
    text.append(3)
    text.num_read = 0
    drafter.draft_token(text, ())
    assert text.num_read <= 2 * LONGEST + 1
