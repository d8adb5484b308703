"""The tokens that a request allows or rules out by itself: `allowed_token_ids` and `bad_words`."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, takewhile

from ppserve.core.scheduling.token_filter import TokenFilter, packed_mask
from ppserve.head.options import GenerationOptions

RULES = ("allowed_token_ids", "bad_words")
"""The options that are such rules."""


def has_rules(given: GenerationOptions) -> bool:
    """Return whether a request allows or rules out tokens by itself."""
    return any(getattr(given, name) for name in RULES)


class TokenTexts:
    """The bytes that each token of a model adds to a text, to search in. Any thread may use it."""

    def __init__(self, text_bytes: Callable[[int], bytes], vocab_size: int) -> None:
        """text_bytes: a tokenizer's. vocab_size: the number of logits of the model."""
        self.of = text_bytes
        self.vocab_size = vocab_size
        self._beginning = threading.Lock()
        self._sorted: list[tuple[bytes, int]] = []

    def beginning_with(self, start: bytes) -> list[int]:
        """Return the tokens whose text begins with `start`, which is not empty."""
        ranked = self._ranked()
        first = bisect_left(ranked, (start, -1))
        found = takewhile(lambda entry: entry[0].startswith(start), islice(ranked, first, None))
        return [token_id for _, token_id in found]

    def containing(self, part: bytes) -> list[int]:
        """Return the tokens whose text has `part` in it. This takes milliseconds."""
        return [token_id for text, token_id in self._ranked() if part in text]

    def _ranked(self) -> list[tuple[bytes, int]]:
        """Return all texts and their tokens, sorted. The first call sorts them: 50,000 tokens take some 50 ms."""
        with self._beginning:
            if not self._sorted:
                self._sorted = sorted((self.of(token_id), token_id) for token_id in range(self.vocab_size))
            return self._sorted


class TokenRules:
    """The rules of one request, and the form of its answers if they have one: a `TokenFilter`.

    An answer's text never has one of the words: a token is forbidden where a word would be complete with it, in
    whichever way the word is divided into tokens.
    """

    def __init__(self, texts: TokenTexts, given: GenerationOptions, form: TokenFilter | None) -> None:
        """Search all tokens for each word. given: has a rule; none of its words is empty."""
        self._texts = texts
        self._allowed = frozenset(given.allowed_token_ids or range(texts.vocab_size))
        self._words = tuple(word.encode() for word in given.bad_words or ())
        self._form = form
        bits = self._bits(self._allowed)
        for word in self._words:
            bits &= ~self._bits(texts.containing(word))
        self._allowed_alone = bits
        """The tokens that may follow whatever the answer has, as a mask that is read as a little-endian number."""

    def allowed(self, output_ids: Sequence[int]) -> bytes:
        """See `TokenFilter`. Raises what the form raises."""
        bits = self._allowed_alone
        end = self._end(output_ids)
        for word in self._words:
            for length in range(1, min(len(word), len(end) + 1)):
                if end.endswith(word[:length]):
                    bits &= ~self._bits(self._texts.beginning_with(word[length:]))
        in_form = None if self._form is None else self._form.allowed(output_ids)
        if in_form is not None:
            bits &= int.from_bytes(in_form, "little")
        return bits.to_bytes(-(-self._texts.vocab_size // 8), "little")

    def permit(self, output_ids: Sequence[int]) -> bool:
        """Return whether these tokens of an answer obey the rules. Its form is not looked at."""
        text = b"".join(map(self._texts.of, output_ids))
        return self._allowed.issuperset(output_ids) and not any(word in text for word in self._words)

    def _end(self, output_ids: Sequence[int]) -> bytes:
        """Return the last bytes of the answer's text, in which a word may have begun."""
        longest, end = max(map(len, self._words), default=1) - 1, b""
        for token_id in reversed(output_ids):
            if len(end) >= longest:
                break
            end = self._texts.of(token_id) + end
        return end

    def _bits(self, token_ids: Iterable[int]) -> int:
        return int.from_bytes(packed_mask(token_ids, self._texts.vocab_size), "little")
