"""Which tokens an answer may have, where a rule such as a grammar says so.

A mask has a bit for each id of the vocabulary: bit i % 8 of byte i // 8, counted from the least significant. A bit
that is set allows its id; ids beyond the mask's end are forbidden. Masks travel in plans (`plan.Draw.mask`). The
rank that draws applies them before temperature, top_k and top_p.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Protocol


class TokenFilter(Protocol):
    """The rule of one request; all of its sequences share it."""

    def allowed(self, output_ids: Seq[int]) -> bytes | None:
        """The mask of the ids that may follow these tokens of an answer, at least one; None: all may.

        It is a pure function: after a loss, and for draft tokens, it is asked again. output_ids: of the answer,
        resumed tokens included. Every one of them was allowed."""


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
