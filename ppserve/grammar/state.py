"""Which tokens may follow: a pure function of a grammar and of the tokens that an answer has."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher, LLTokenizer

from ppserve.grammar.limits import parser_limits
from ppserve.grammar.structured_output import FormRefused, GrammarFailed


class Grammar:
    """A form that has been compiled. Immutable, for any threads."""

    def __init__(self, text: str, library: LLTokenizer, source_bytes: int) -> None:
        """text: as `translate` makes it. Takes up to seconds, without the interpreter's lock. Raises
        FormRefused."""
        self._fresh = LLMatcher(library, text, log_level=0, limits=parser_limits())
        self.source_bytes = source_bytes
        if self._fresh.is_error():
            raise FormRefused(_first_line(self._fresh.get_error()))

    def fresh_matcher(self) -> LLMatcher:
        """Its own copy for one answer, so what others have written does not matter to its limits."""
        return self._fresh.deep_copy()


class GrammarFilter:
    """The tokens that one sequence may have next. Each method is a function of `output_ids` alone.

    The last state is kept, so another token costs one step; any other sequence of tokens is read from the start.
    Not for several threads at once.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._matcher = grammar.fresh_matcher()
        self._consumed: list[int] = []

    def mask(self, output_ids: Sequence[int]) -> bytes:
        """One bit for each of the model's logits, whether its token may follow: the lowest bit of the first byte
        is token 0, and 32-bit words are filled up with zeros. Raises GrammarFailed."""
        matcher = self._state(output_ids)
        bits = bytes(matcher.compute_bitmask())
        self._check(matcher)
        if not any(bits):
            raise GrammarFailed("no token of this model can continue the answer in its form")
        return bits

    def accepts(self, output_ids: Sequence[int], draft: Sequence[int]) -> int:
        """How many tokens of a draft may follow, one after the other. Raises GrammarFailed."""
        matcher = self._state(output_ids)
        num_accepted = int(matcher.validate_tokens([*draft]))
        self._check(matcher)
        return num_accepted

    def is_complete(self, output_ids: Sequence[int]) -> bool:
        """Whether the answer has its form and may end here. Raises GrammarFailed."""
        return bool(self._state(output_ids).is_accepting())

    def forced(self, output_ids: Sequence[int], limit: int) -> list[int]:
        """The tokens, at most so many, of which each is the only one that may follow: they need no draw. Not those
        that end the answer. Raises GrammarFailed."""
        matcher = self._state(output_ids)
        found: list[int] = []
        while len(found) < limit and not matcher.is_accepting():
            bits = int.from_bytes(matcher.compute_bitmask(), "little")
            is_single = bits and not bits & (bits - 1)
            if not is_single or not matcher.consume_token(bits.bit_length() - 1):
                break
            found.append(bits.bit_length() - 1)
        self._check(matcher)
        matcher.rollback(len(found))
        return found

    def _state(self, output_ids: Sequence[int]) -> LLMatcher:
        """The matcher behind these tokens. Raises GrammarFailed."""
        num_consumed = len(self._consumed)
        if self._matcher.is_error() or [*output_ids[:num_consumed]] != self._consumed:
            self._matcher, self._consumed, num_consumed = self._grammar.fresh_matcher(), [], 0
        for token_id in output_ids[num_consumed:]:
            self._matcher.consume_token(token_id)
            self._consumed.append(token_id)
        self._check(self._matcher)
        return self._matcher

    @staticmethod
    def _check(matcher: LLMatcher) -> None:
        if matcher.is_error():
            raise GrammarFailed(f"the answer's form cannot be followed: {_first_line(matcher.get_error())}")


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:500]
