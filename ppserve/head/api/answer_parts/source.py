"""The text of an answer, which readers read as it comes.

A reader is a generator that yields parts, and None where it needs more text to go on. What its parts say depends
on the text alone, and not on how the text is cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

from ppserve.errors import PpserveError
from ppserve.head.api.answer_parts.parts import AnswerText, Part

T = TypeVar("T")
Parsing = Generator[Part | None, None, T]

_WORD = re.compile(r"[\w.:/-]*", re.ASCII)
_STRUCTURE = re.compile(r'["{}\[\]<,:;\s]')
_STRING_END = re.compile(r'["\\]')


class AnswerEnds(PpserveError):
    """The text ends where a reader needs more."""


class NotACall(PpserveError):
    """The text looked like a call of a tool and is none."""


class Source:
    """The text of one answer that is not read yet."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._num_forgotten = 0
        self._held_from: int | None = None
        self._has_ended = False
        self.is_cut = False
        """Whether the model would have gone on."""

    def add(self, text: str) -> None:
        start = self._at if self._held_from is None else self._held_from
        self._text = self._text[start:] + text
        self._num_forgotten += start
        self._at -= start
        self._held_from = None if self._held_from is None else 0

    @property
    def place(self) -> int:
        """How many characters of the answer were read."""
        return self._num_forgotten + self._at

    def end(self, is_cut: bool) -> None:
        """Note that no more text comes."""
        self._has_ended = True
        self.is_cut = is_cut

    # ---- what may turn out to be text ----

    def hold(self) -> None:
        """Keep what is read from here on."""
        self._held_from = self._at

    def let_go(self) -> None:
        """Forget what was held: it is what it looked like, and no text."""
        self._held_from = None

    def release(self) -> Iterator[Part]:
        """Yield what was held, as text."""
        text = "" if self._held_from is None else self._text[self._held_from : self._at]
        self._held_from = None
        if text:
            yield AnswerText(text)

    # ---- for readers ----

    def next_visible(self) -> Parsing[str]:
        """Read over blanks. Return the character behind them, which is still to be read. Raises AnswerEnds."""
        while True:
            while self._at < len(self._text):
                if not (char := self._text[self._at]).isspace():
                    return char
                self._at += 1
            yield from self._more()

    def skip(self, count: int = 1) -> None:
        """Read characters that are known to be there."""
        self._at += count

    def starts_with(self, *words: str) -> Parsing[str | None]:
        """Read and return the one of these words with which the text goes on; return None if it goes on otherwise.

        None of the words may begin another one.
        """
        while True:
            rest = self._text[self._at : self._at + max(map(len, words))]
            for word in words:
                if rest.startswith(word):
                    self._at += len(word)
                    return word
            if self._has_ended or not any(word.startswith(rest) for word in words):
                return None
            yield None

    def goes_on_with(self, word: str) -> Parsing[bool]:
        """Read this word, if the text goes on with it, and return whether it does. Raises AnswerEnds for a text
        that ends within the word."""
        while not self._text.startswith(word, self._at):
            if not word.startswith(self._text[self._at :]):
                return False
            yield from self._more()
        self._at += len(word)
        return True

    def word(self) -> Parsing[str]:
        """Read the characters that a tool's name may have. Raises AnswerEnds."""
        word = ""
        while True:
            found = _WORD.match(self._text, self._at)
            word += found[0] if found else ""
            self._at += len(found[0]) if found else 0
            if self._at < len(self._text):
                return word
            yield from self._more()

    def until(
        self, markers: tuple[str, ...], make: Callable[[str], Part] | None, holds: bool = False
    ) -> Parsing[str | None]:
        """Read to the first marker, and over it. Return the marker; None if the answer ends without one.

        The text in front of it, without the blanks at its end, is yielded as parts that `make` makes, or dropped.
        holds: whether the marker and the blanks may turn out to be text.
        """
        self._held_from = None
        while True:
            rest = self._text[self._at :]
            found = min(((at, word) for word in markers if (at := rest.find(word)) >= 0), default=None)
            length = len(rest) - max((_begun(word, rest) for word in markers), default=0)
            if found is not None:
                length = found[0]
            elif self._has_ended:
                length = len(rest)
            may_be_dropped = found is not None or (markers and not self._has_ended)
            piece = rest[:length].rstrip() if may_be_dropped else rest[:length]
            self._at += len(piece)
            if piece and make is not None:
                yield make(piece)
            if found is not None:
                self._held_from = self._at if holds else None
                self._at += length - len(piece) + len(found[1])
                return found[1]
            if self._has_ended:
                return None
            yield None

    def text_until(self, marker: str) -> Parsing[str]:
        """Read to a marker, and over it. Return what precedes it. Raises AnswerEnds."""
        while (at := self._text.find(marker, self._at)) < 0:
            yield from self._more()
        text = self._text[self._at : at]
        self._at = at + len(marker)
        return text

    def unread(self, marker: str) -> None:
        """Give back the marker that was read last."""
        self._at -= len(marker)

    def json(self, make: Callable[[str], Part] | None = None) -> Parsing[str]:
        """Read one JSON value, and return its text. If `make` is given, it makes parts of pieces of the value.

        Raises AnswerEnds, and NotACall for text that is no JSON.
        """
        value, pieces = _JsonEnd(), []
        while True:
            rest = self._text[self._at :]
            length, is_whole = value.length(rest)
            self._at += length
            pieces.append(rest[:length])
            if length and make is not None:
                yield make(rest[:length])
            if value.is_broken:
                raise NotACall
            if is_whole or (self._has_ended and value.is_plain):
                return "".join(pieces)
            yield from self._more()

    def _more(self) -> Parsing[None]:
        if self._has_ended:
            raise AnswerEnds
        yield None


class _JsonEnd:
    """Finds where a JSON value ends that comes in pieces of text. Brackets are counted, not matched."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self.is_broken = False
        """Whether it has a `<` outside of a string: no JSON has, but a marker may begin so."""
        self.is_plain = True
        """Whether it has been no string, object or list so far, and so may end with the text."""

    def length(self, text: str) -> tuple[int, bool]:
        """Return how many characters of the text belong to it, and whether it ends there."""
        at = 0
        while at < len(text):
            if self._in_string:
                at = self._string_end(text, at)
                if not self._in_string and not self._depth:
                    return at, True
                continue
            if (found := _STRUCTURE.search(text, at)) is None:
                break
            at, char = found.end(), found[0]
            if char == '"':
                self._in_string, self.is_plain = True, False
            elif char in "{[":
                self._depth += 1
                self.is_plain = False
            elif char in "}]" and self._depth:
                self._depth -= 1
                if not self._depth:
                    return at, True
            elif char == "<":
                self.is_broken = True
                return at - 1, False
            elif not self._depth:
                return at - 1, True
        return len(text), False

    def _string_end(self, text: str, at: int) -> int:
        """Return the place behind the string's end, or behind the text's, if the string goes on."""
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            if (found := _STRING_END.search(text, at)) is None:
                break
            at = found.end()
            if found[0] == '"':
                self._in_string = False
                return at
            self._is_escaped = True
        return len(text)


def _begun(word: str, text: str) -> int:
    """Return how many of the last characters of `text` are a beginning of `word`."""
    longest = min(len(word) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if text.endswith(word[:length])), 0)
