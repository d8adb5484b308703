"""Which tokens an answer may have, if a rule such as a grammar decides that.

A mask has a bit for each id of the vocabulary: for id i it is bit i % 8 of byte i // 8, counted from the least
significant. A bit that is set allows its id. Ids beyond the mask's end are forbidden. Masks travel in plans
(`plan.Draw.mask`). The rank that draws applies them before temperature, top_k and top_p.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from ppserve.errors import AnswerImpossible, PpserveError, RequestError, RequestFailed


class TokenFilter(Protocol):
    """The rule of one request; all of its sequences share it."""

    def allowed(self, output_ids: Seq[int]) -> bytes | None:
        """Return the mask of the ids that may follow these tokens of an answer; None: all may.

        This is a pure function: it is called again for the same tokens after a loss, and for draft tokens. It may
        take long, but waits for nothing. It may raise a PpserveError, whose text the caller reads. output_ids: all
        tokens of the answer, resumed ones included; each of them was allowed.
        """


class Mask(Struct, frozen=True):
    """Which ids may follow certain tokens of an answer."""

    bits: bytes | None
    """The mask; None: all ids may follow."""


@dataclass(slots=True, eq=False)
class AskedMask:
    """A mask that a sequence has asked for."""

    output_ids: tuple[int, ...]
    """The tokens of the answer that it follows."""
    made: Mask | RequestError | None = None
    """The mask, or the error that ends the request; None while it is being made."""
    is_there: bool = False
    """Whether `look` has found it."""

    def look(self, banned: Seq[int]) -> bool:
        """Return whether the mask is there. Raises the RequestError that ends the request, also where the mask
        allows no ids but banned ones."""
        if isinstance(self.made, RequestError):
            raise self.made
        if self.made is None:
            return False
        bits = self.made.bits
        left = without(bits, banned) if bits and banned else bits
        if left is not None and left == bytes(len(left)):
            raise AnswerImpossible(f"no token may follow the {len(self.output_ids)} tokens of the answer")
        self.is_there = True
        return True

    @property
    def bits(self) -> bytes | None:
        """The mask, once it is there; None: all ids may follow."""
        assert isinstance(self.made, Mask)
        return self.made.bits


class MaskSource(Protocol):
    """Where a request's sequences get their masks from."""

    @property
    def is_slow(self) -> bool:
        """Whether making a mask may take longer than a step, so that no step should be sent before its masks."""

    def ask(self, output_ids: tuple[int, ...]) -> AskedMask:
        """Ask for the mask that the TokenFilter gives for these tokens. It may be made later, in any thread."""


class ImmediateMasks:
    """A source that makes each mask when it is asked for."""

    is_slow = False

    def __init__(self, token_filter: TokenFilter) -> None:
        self.token_filter = token_filter

    def ask(self, output_ids: tuple[int, ...]) -> AskedMask:
        return AskedMask(output_ids, make_mask(self.token_filter, output_ids))


def make_mask(token_filter: TokenFilter, output_ids: Seq[int]) -> Mask:
    """Ask a filter. Raises AnswerImpossible if it raises a PpserveError, and RequestFailed if it raises another
    error: then the filter is at fault."""
    try:
        return Mask(token_filter.allowed(output_ids))
    except PpserveError as error:
        raise AnswerImpossible(str(error)) from error
    except Exception as error:
        raise RequestFailed(f"the rule of the answer failed: {type(error).__name__}") from error


def without(bits: bytes, banned: Iterable[int]) -> bytes:
    """Return a mask that allows what `bits` allows, without these ids."""
    mask = bytearray(bits)
    for token_id in banned:
        if token_id < 8 * len(mask):
            mask[token_id // 8] &= ~(1 << token_id % 8)
    return bytes(mask)


def packed_mask(token_ids: Iterable[int], vocab_size: int) -> bytes:
    """Return the mask that allows these ids and no others."""
    mask = bytearray(-(-vocab_size // 8))
    for token_id in token_ids:
        mask[token_id // 8] |= 1 << token_id % 8
    return bytes(mask)


def is_allowed(mask: bytes | None, token_id: int) -> bool:
    """Return whether a mask allows an id. None is the mask that allows all ids."""
    if mask is None:
        return True
    return token_id < 8 * len(mask) and bool(mask[token_id // 8] >> token_id % 8 & 1)
