"""Which tokens an answer may have, where a rule such as a grammar says so.

A mask has a bit for each id of the vocabulary: bit i % 8 of byte i // 8, counted from the least significant. A bit
that is set allows its id; ids beyond the mask's end are forbidden. Masks travel in plans (`plan.Draw.mask`). The
rank that draws applies them before temperature, top_k and top_p.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from ppserve.errors import AnswerImpossible, PpserveError, RequestFailed


class TokenFilter(Protocol):
    """The rule of one request; all of its sequences share it."""

    def allowed(self, output_ids: Seq[int]) -> bytes | None:
        """The mask of the ids that may follow these tokens of an answer; None: all may. It may take long, and
        raise a PpserveError: its text is what the caller reads.

        It is a pure function: after a loss, and for draft tokens, it is asked again. output_ids: of the answer,
        resumed tokens included. Every one of them was allowed."""


@dataclass(frozen=True, slots=True)
class Mask:
    """What may follow some tokens of an answer."""

    bits: bytes | None
    """None: all ids may."""


class MaskSource(Protocol):
    """Where a request's sequences get their masks from."""

    @property
    def is_slow(self) -> bool:
        """Whether a step should not be sent before its mask is there."""

    def find(self, output_ids: tuple[int, ...]) -> Mask | None:
        """The mask that a TokenFilter gives for these tokens. None: it is not there yet, and is being made; it is
        asked for again. Returns at once. Raises the RequestError that ends the request."""


class ImmediateMasks:
    """A source that makes each mask when it is asked for."""

    is_slow = False

    def __init__(self, token_filter: TokenFilter) -> None:
        self.token_filter = token_filter

    def find(self, output_ids: tuple[int, ...]) -> Mask:
        return make_mask(self.token_filter, output_ids)


def make_mask(token_filter: TokenFilter, output_ids: Seq[int]) -> Mask:
    """Ask a filter. Raises AnswerImpossible where it refuses, and RequestFailed where it is at fault itself."""
    try:
        return Mask(token_filter.allowed(output_ids))
    except PpserveError as error:
        raise AnswerImpossible(str(error)) from error
    except Exception as error:
        raise RequestFailed(f"the rule of the answer failed: {type(error).__name__}") from error


def without(bits: bytes, banned: Iterable[int]) -> bytes:
    """The mask that allows these ids no more."""
    mask = bytearray(bits)
    for token_id in banned:
        if token_id < 8 * len(mask):
            mask[token_id // 8] &= ~(1 << token_id % 8)
    return bytes(mask)


def packed_mask(token_ids: Iterable[int], vocab_size: int) -> bytes:
    """The mask that allows these ids."""
    mask = bytearray(-(-vocab_size // 8))
    for token_id in token_ids:
        mask[token_id // 8] |= 1 << token_id % 8
    return bytes(mask)


def is_allowed(mask: bytes | None, token_id: int) -> bool:
    """Whether a mask, or None for that of all ids, allows an id."""
    if mask is None:
        return True
    return token_id < 8 * len(mask) and bool(mask[token_id // 8] >> token_id % 8 & 1)
