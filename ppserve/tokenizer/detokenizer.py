"""Decodes the token ids of one stream. Text is returned as early as possible, and never taken back.

Text is held back while a character's bytes are incomplete, or while the text's end may be the beginning of a stop
string. The pieces joined are the text of all ids decoded at once, cut at the first stop string.
"""

from __future__ import annotations

import codecs

from msgspec import Struct

from ppserve.tokenizer.tokenizer import Tokenizer


class Piece(Struct, frozen=True):
    """The text that a token adds to a stream, which may be empty. matched: the stop string that ended it."""

    text: str
    matched: str | None = None


class Detokenizer:
    """The undecoded bytes and the held-back text of one stream.

    The stop string that is complete first ends the stream. If one character completes several, the longest of them
    does, which began first. With `include_stop` the text ends with the matched string, otherwise before it.
    The first `min_tokens` tokens are not searched for stop strings. Unless `skips_special`, the text has the names
    of special tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skips_special: bool = True,
    ) -> None:
        self._bytes_of = tokenizer.text_bytes if skips_special else tokenizer.token_bytes
        self._stops = frozenset(stop)
        self._first_characters = frozenset(text[0] for text in stop)
        self._include_stop = include_stop
        self._num_unsearched = min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._ended = False

    def push(self, token_id: int) -> Piece:
        """Add a token, and return the text that is certain then; empty after a match or `finish`."""
        if self._ended:
            return Piece("")
        text = self._decoder.decode(self._bytes_of(token_id))
        if self._num_unsearched:
            self._num_unsearched -= 1
            return Piece(text)
        return self._release(text)

    def finish(self) -> str:
        """Return the text that was held back, with U+FFFD for an incomplete character."""
        if self._ended:
            return ""
        text = self._release(self._decoder.decode(b"", final=True)).text + self._held
        self._ended = True
        self._held = ""
        return text

    def _release(self, text: str) -> Piece:
        if not self._held and self._first_characters.isdisjoint(text):
            return Piece(text)
        seen = self._held + text
        # The (end, begin) of each complete stop string in the text. The text held back before contained none.
        found = [(begin + len(stop), begin) for stop in self._stops if (begin := seen.find(stop)) >= 0]
        if found:
            end, begin = min(found)
            self._ended = True
            self._held = ""
            return Piece(seen[: end if self._include_stop else begin], seen[begin:end])
        keep = max(_begun(stop, seen) for stop in self._stops)
        self._held = seen[len(seen) - keep :]
        return Piece(seen[: len(seen) - keep])


def _begun(stop: str, text: str) -> int:
    """Return how many of the last characters of `text` are a beginning of `stop`."""
    longest = min(len(stop) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
