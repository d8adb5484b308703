"""Decodes the token ids of one stream. Text is given out as early as possible and never taken back.

Text waits in two cases: a character's bytes are not all there, or the end of the text may be the beginning of a
stop string. The pieces joined are what decoding all ids at once gives, cut at the first stop string.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass

from ppserve.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """Text added to a stream, possibly empty. matched: the stop string that ended the stream, if one did."""

    text: str
    matched: str | None = None


class StopString:
    """Finds one string in text that arrives character by character (Knuth, Morris and Pratt).

    length: how many of the last characters equal the beginning of the stop string.
    """

    def __init__(self, text: str) -> None:
        if not text:
            raise ValueError("a stop string must not be empty")
        self.text = text
        self.length = 0
        self._fallback = [0] * (len(text) + 1)
        for end in range(1, len(text)):
            self._fallback[end + 1] = self._extend(self._fallback[end], text[end])

    def see(self, character: str) -> bool:
        """Reads the next character. Returns whether it completes the stop string."""
        self.length = self._extend(self.length, character)
        return self.length == len(self.text)

    def _extend(self, length: int, character: str) -> int:
        while length and (length == len(self.text) or self.text[length] != character):
            length = self._fallback[length]
        return length + 1 if self.text[length] == character else 0


class Detokenizer:
    """Undecoded bytes and held-back text of one stream.

    The stop string that is complete first ends the stream; if one character completes several, the longest,
    because it began first. So where a stream stops depends on its text, not on how tokens divide the text. With
    `include_stop` the text ends with the matched string, otherwise before it. The text of the first `min_tokens`
    tokens is not searched for stop strings.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = sorted((StopString(text) for text in set(stop)), key=lambda s: (-len(s.text), s.text))
        self._first_characters = frozenset(stop.text[0] for stop in self._stops)
        self._include_stop = include_stop
        self._num_unsearched = min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._ended = False

    def push(self, token_id: int) -> Piece:
        """The text that is certain with this token. After a match, and after `finish`, always empty."""
        if self._ended:
            return Piece("")
        text = self._decoder.decode(self._tokenizer.text_bytes(token_id))
        if self._num_unsearched:
            self._num_unsearched -= 1
            return Piece(text)
        return self._release(text)

    def finish(self) -> str:
        """The text that was held back, with U+FFFD for an incomplete character."""
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
        for at in range(len(self._held), len(seen)):
            # A list, not `any`: every stop string must read the character. The first one complete is the longest.
            complete = [stop for stop in self._stops if stop.see(seen[at])]
            if complete:
                self._ended = True
                self._held = ""
                end = at + 1 if self._include_stop else at + 1 - len(complete[0].text)
                return Piece(seen[:end], complete[0].text)
        keep = max(stop.length for stop in self._stops)
        self._held = seen[len(seen) - keep :]
        return Piece(seen[: len(seen) - keep])
