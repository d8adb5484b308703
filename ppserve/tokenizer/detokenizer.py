"""Token ids of one stream into text, as early as possible and never to be taken back.

Two things delay text: a character whose bytes are not all there, and an end of text that may still become a
stop string. Both delays end as soon as they can; joined, the pieces are the one-shot decode of all ids, cut at
the first stop string.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass

from ppserve.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """What was added to a stream: text, possibly empty, and the stop string that ended it, if one did."""

    text: str
    matched: str | None = None


class StopString:
    """Finds one string in text that arrives character by character (Knuth, Morris and Pratt).

    length: how many of the last characters seen are the beginning of the stop string.
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
        """Takes the next character; whether the stop string is complete with it."""
        self.length = self._extend(self.length, character)
        return self.length == len(self.text)

    def _extend(self, length: int, character: str) -> int:
        while length and (length == len(self.text) or self.text[length] != character):
            length = self._fallback[length]
        return length + 1 if self.text[length] == character else 0


class Detokenizer:
    """Undecoded bytes and held-back text of one stream.

    The stop string that is complete first ends the stream; of several complete at the same character, the
    longest, which began first. So where a stream stops depends on its text alone, not on where tokens end.
    With `include_stop` the matched string is the end of the text, otherwise it is left out. Stop strings are
    not looked for in the text of the first `min_tokens` tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = sorted((StopString(text) for text in set(stop)), key=lambda s: (-len(s.text), s.text))
        self._first_characters = frozenset(stop.text[0] for stop in self._stops)
        self._include_stop = include_stop
        self._immune = min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._ended = False

    def push(self, token_id: int) -> Piece:
        """The text that this token sets free. After a match, or `finish`, always empty."""
        if self._ended:
            return Piece("")
        text = self._decoder.decode(self._tokenizer.text_bytes(token_id))
        if self._immune:
            self._immune -= 1
            return Piece(text)
        return self._release(text)

    def finish(self) -> str:
        """Whatever was held back, with U+FFFD for a character that never became whole."""
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
            # Every stop string sees the character; the list begins with the longest.
            complete = [stop for stop in self._stops if stop.see(seen[at])]
            if complete:
                self._ended = True
                self._held = ""
                end = at + 1 if self._include_stop else at + 1 - len(complete[0].text)
                return Piece(seen[:end], complete[0].text)
        keep = max(stop.length for stop in self._stops)
        self._held = seen[len(seen) - keep :]
        return Piece(seen[: len(seen) - keep])
