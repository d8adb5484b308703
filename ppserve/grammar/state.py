"""The tokens that may follow in an answer: a pure function of a grammar and of the tokens that the answer has."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

from ppserve.grammar.limits import parser_limits
from ppserve.grammar.structured_output import FormRefused, GrammarFailed

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_STATES = 16
"""The last states of so many of a request's answers are kept."""
MAX_ROLLBACK = 16
"""A kept state goes back so many tokens at most. Where it would have to go back further, an answer is read from
its start."""


class Grammar:
    """A form that has been compiled. It never changes, and any thread may use it."""

    def __init__(self, text: str, library: LLTokenizer, source_bytes: int) -> None:
        """Compile a text that `translate` has made. This may take seconds, without the interpreter's lock.

        Raises FormRefused.
        """
        from llguidance import LLMatcher

        self._fresh = LLMatcher(library, text, log_level=0, limits=parser_limits())
        self.source_bytes = source_bytes
        if self._fresh.is_error():
            raise FormRefused(_first_line(self._fresh.get_error()))

    def fresh_matcher(self) -> LLMatcher:
        """Return a copy for one answer, so that other answers do not count towards its limits."""
        return self._fresh.deep_copy()


class _State:
    """A matcher, and the tokens that it has read."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.consumed: tuple[int, ...] = ()

    def num_common(self, output_ids: Sequence[int]) -> int:
        """Return how many of the tokens that this state has read the answer begins with.

        It is 0 if the state cannot go back to them: because they are further back than MAX_ROLLBACK, or because
        the state is at its end, where the library no longer counts tokens.
        """
        common = max(0, len(self.consumed) - MAX_ROLLBACK)
        if tuple(output_ids[:common]) != self.consumed[:common]:
            return 0
        for ours, theirs in zip(self.consumed[common:], output_ids[common:], strict=False):
            if ours != theirs:
                break
            common += 1
        return 0 if common < len(self.consumed) and self.matcher.is_stopped() else common

    def move_to(self, output_ids: Sequence[int], num_common: int) -> None:
        """Forget what was read behind the common tokens, and read the others."""
        if num_common < len(self.consumed):
            self.matcher.rollback(len(self.consumed) - num_common)
        for token_id in output_ids[num_common:]:
            self.matcher.consume_token(token_id)
        self.consumed = tuple(output_ids)


class GrammarFilter:
    """The tokens that the answers of one request may have next: a `TokenFilter` of core/scheduling.

    Each method is a function of `output_ids` alone. The last states are kept, for several sequences: one token
    more is then one step, and to go back over a few draft tokens that were not taken is one, too. An answer
    without a kept state is read from its start. Only one thread at a time may use it.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._states: list[_State] = []
        """The state that was used last is the last of these."""

    def allowed(self, output_ids: Sequence[int]) -> bytes:
        """Return the mask of the ids that may follow: bit i % 8 of byte i // 8 is id i. Raises GrammarFailed.

        Zeros fill it up to whole words of 32 bits.
        """
        matcher = self._matcher(output_ids)
        bits = bytes(matcher.compute_bitmask())
        _check(matcher)
        if bits == bytes(len(bits)):
            raise GrammarFailed("no token of this model can continue the answer in its form")
        return bits

    def accepts(self, output_ids: Sequence[int], draft: Sequence[int]) -> int:
        """Return how many tokens of a draft may follow, one after the other. Raises GrammarFailed."""
        matcher = self._matcher(output_ids)
        num_accepted = int(matcher.validate_tokens([*draft]))
        _check(matcher)
        return num_accepted

    def is_complete(self, output_ids: Sequence[int]) -> bool:
        """Return whether the answer has its form and may end here. Raises GrammarFailed."""
        return bool(self._matcher(output_ids).is_accepting())

    def forced(self, output_ids: Sequence[int], limit: int) -> list[int]:
        """Return the next tokens, at most `limit`, as far as each is the only one that may follow: they need no
        draw.

        Tokens that end the answer are not among them. Raises GrammarFailed.
        """
        matcher = self._matcher(output_ids)
        found: list[int] = []
        while len(found) < limit and not matcher.is_accepting():
            bits = int.from_bytes(matcher.compute_bitmask(), "little")
            is_single = bits and not bits & (bits - 1)
            if not is_single or not matcher.consume_token(bits.bit_length() - 1):
                break
            found.append(bits.bit_length() - 1)
        _check(matcher)
        matcher.rollback(len(found))
        return found

    def _matcher(self, output_ids: Sequence[int]) -> LLMatcher:
        """Return a matcher that has read exactly these tokens. Raises GrammarFailed."""
        last = self._states[-1] if self._states else None
        if last is not None and output_ids and last.consumed == output_ids[:-1] and not last.matcher.is_error():
            last.move_to(output_ids, len(last.consumed))  # as most often
            _check(last.matcher)
            return last.matcher
        states = [state for state in self._states if not state.matcher.is_error()]
        num_common, near = max(
            ((state.num_common(output_ids), state) for state in states), key=itemgetter(0), default=(0, None)
        )
        if near is not None and (num_common or not near.consumed):
            states.remove(near)
        else:
            near = _State(self._grammar.fresh_matcher())
        self._states = [*states[-MAX_STATES + 1 :], near]
        near.move_to(output_ids, num_common)
        _check(near.matcher)
        return near.matcher


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarFailed(f"the answer's form cannot be followed: {_first_line(matcher.get_error())}")


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:500]
