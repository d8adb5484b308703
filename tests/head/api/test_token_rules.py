"""`allowed_token_ids` and `bad_words`: which tokens may follow, held against a search of the whole text."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from ppserve.core.scheduling.token_filter import is_allowed, packed_mask
from ppserve.head.api.token_rules import TokenRules, TokenTexts
from ppserve.head.options import GenerationOptions

TEXTS = [b"a", b"b", b"ab", b"ba", b"aab", b"\xc3", b"\xa4", "ä".encode(), b"", b" a", b"bb", b"aba", b"b\xc3"]
SIZE = len(TEXTS)
WORDS = ("aa", "ab", "aba", "ä", "bä", "b", "babab", "aabaab")


def rules(allowed_ids: Sequence[int] = (), words: Sequence[str] = (), form: object = None) -> TokenRules:
    given = GenerationOptions(allowed_token_ids=allowed_ids, bad_words=words)
    return TokenRules(TokenTexts(TEXTS.__getitem__, SIZE), given, form)  # type: ignore[arg-type]


def text_of(ids: Sequence[int]) -> bytes:
    return b"".join(TEXTS[token_id] for token_id in ids)


def allowed(rule: TokenRules, ids: Sequence[int]) -> set[int]:
    mask = rule.allowed(ids)
    assert len(mask) == -(-SIZE // 8)
    return {token_id for token_id in range(8 * len(mask)) if is_allowed(mask, token_id)}


@pytest.mark.parametrize("seed", range(40))
def test_a_token_is_forbidden_where_a_word_would_be_complete_with_it_and_nowhere_else(seed: int) -> None:
    chance = random.Random(seed)
    words = chance.sample(WORDS, chance.randint(1, 3))
    ids = [*range(SIZE)] if chance.random() < 0.5 else sorted(chance.sample(range(SIZE), 9))
    rule, answer, num_forbidden = rules(ids if len(ids) < SIZE else (), words), list[int](), 0
    for _ in range(30):
        may_follow = {
            token_id
            for token_id in ids
            if not any(word.encode() in text_of([*answer, token_id]) for word in words)
        }
        assert allowed(rule, answer) == may_follow
        assert rule.permit(answer)
        for token_id in set(ids) - may_follow:
            assert not rule.permit([*answer, token_id])
            num_forbidden += 1
        if not may_follow:
            break
        answer.append(chance.choice(sorted(may_follow)))
    assert num_forbidden > 0


def test_a_form_holds_beside_the_rules() -> None:
    class Form:
        def allowed(self, output_ids: Sequence[int]) -> bytes | None:
            return None if not output_ids else packed_mask([0, 1, 2], SIZE)

    rule = rules([1, 2, 3], ["ba"], Form())
    assert allowed(rule, []) == {1, 2}, "a word that no token begins with"
    assert allowed(rule, [0]) == {1, 2}
    assert allowed(rule, [1]) == {1}


def test_tokens_that_are_not_allowed_are_not_permitted() -> None:
    assert rules([1, 2]).permit([2, 1, 1])
    assert not rules([1, 2]).permit([2, 0])
    assert rules().permit([*range(SIZE)])
