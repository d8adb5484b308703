"""Draft tokens of a sequence's next token, from the sequence itself.

A draft token changes no token: each token is drawn from the model as it would be without draft tokens, and a
draft token only decides what may be computed before that token is known. So a drafter may be anything, and need
not be kept when a stage is lost or an answer is resumed.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from ppserve.core.request import Request


class DraftToken(NamedTuple):
    """probability: of the draft token being right, if all tokens before it are."""

    token_id: int
    probability: float


class Drafter(Protocol):
    """Draft tokens for one sequence."""

    def draft_token(self, token_ids: Seq[int], draft_tokens: Seq[int]) -> DraftToken | None:
        """The token that may follow `token_ids` and then `draft tokens`; None where there is nothing to go by.

        token_ids only ever grows from call to call.
        """
        ...


NewDrafter = Callable[[Request, int], Drafter]
"""Makes the drafter of one answer: the request, and which of its sequences."""


def look_up_prompts(_request: Request, _index: int) -> Drafter:
    return PromptLookup()


LONGEST = 3
"""Tokens. Longer matches are hardly better: the latest place where three tokens match is mostly the right one."""

# How often a draft token is right before there is experience, by the length of the match, and the weight of the
# newest experience: about the last 16 count.
_PRIORS = (0.0, 0.2, 0.4, 0.6)
_NEWEST = 1 / 16
_TOKEN_BITS = 20
# Tokens that are learnt in one call, in some 0.5 ms: all requests wait with the engine while it learns a prompt.
MOST_LEARNT = 256


class PromptLookup:
    """Finds the latest earlier place where the last tokens, up to LONGEST, stand too; draft tokens what followed
    there.

    Every known token tells whether it would have been drafted, also while no draft token is asked for. So how
    much a draft token is worth is known for this very text, and draft tokens that would fail are known to before
    they cost anything. Time and memory are constant per token.
    """

    def __init__(self) -> None:
        self._followers: dict[int, int] = {}
        self._hit_rates = list(_PRIORS)
        self._num_learned = 0

    def draft_token(self, token_ids: Seq[int], draft_tokens: Seq[int]) -> DraftToken | None:
        self._learn(token_ids)
        if self._num_learned < len(token_ids):
            return None
        tail = [*token_ids[-LONGEST:], *draft_tokens][-LONGEST:]
        found = self._find(tail)
        if found is None:
            return None
        length, token_id = found
        return DraftToken(token_id, self._hit_rates[length])

    def _learn(self, token_ids: Seq[int]) -> None:
        """The next tokens not seen yet: how good a draft token of each would have been, and what followed what."""
        until = min(len(token_ids), self._num_learned + MOST_LEARNT)
        for place in range(self._num_learned, until):
            token_id = token_ids[place]
            before = token_ids[max(0, place - LONGEST) : place]
            if (found := self._find(before)) is not None:
                length, drafted = found
                self._hit_rates[length] += ((drafted == token_id) - self._hit_rates[length]) * _NEWEST
            for key in _keys(before):
                self._followers[key] = token_id
        self._num_learned = until

    def _find(self, tail: Seq[int]) -> tuple[int, int] | None:
        """(tokens that match, what followed them) of the longest match."""
        followers = self._followers
        for skipped, key in enumerate(_keys(tail)):
            if key in followers:
                return len(tail) - skipped, followers[key]
        return None


def _keys(tail: Seq[int]) -> list[int]:
    """A number for each end of `tail`, the longest first. The leading 1 tells ends of different lengths apart."""
    keys, key, place = [], 0, 0
    for token_id in reversed(tail):
        key |= token_id << place
        place += _TOKEN_BITS
        keys.append(key | 1 << place)
    keys.reverse()
    return keys
