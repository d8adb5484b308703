"""Texts that remember which of their characters the template wrote.

A `Traced` is a str: it compares and searches as a plain one does, and every operation has the same text as result.
The parts of texts in a result keep their origin. Where that is not known, nothing counts as the template's. So
what a caller typed never becomes the template's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

# Two planes of private characters: a formatted text shows by them which kind of argument a character came from.
_CALLERS, _OWN = 0xF0000, 0x100000
_UNKNOWN = chr(0x10FFFF)


class Traced(str):
    """A text. own: a byte for each character, 1 where the template wrote it; None if it wrote none of them."""

    __slots__ = ("own",)
    own: bytes

    def __new__(cls, text: object = "", own: bytes | None = None) -> Self:
        self = super().__new__(cls, text)
        self.own = bytes(len(self)) if own is None else own
        return self

    def __str__(self) -> str:
        return self

    def __iter__(self) -> Iterator[str]:
        return (Traced(char, bytes([own])) for char, own in zip(super().__iter__(), self.own, strict=True))

    def __getitem__(self, where: Any) -> Traced:
        own = self.own[where]
        return Traced(super().__getitem__(where), own if isinstance(own, bytes) else bytes([own]))

    def __add__(self, other: str) -> Traced:
        is_plain = isinstance(other, str) and not hasattr(other, "__html__")  # that one escapes this one
        return joined((self, other)) if is_plain else NotImplemented

    def __radd__(self, other: str) -> Traced:
        return joined((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: Any) -> Traced:
        return Traced(super().__mul__(count), self.own * count) if isinstance(count, int) else NotImplemented

    __rmul__ = __mul__

    def __mod__(self, given: Any) -> Traced:
        return formatted(super().__mod__, self, given)

    def join(self, parts: Iterable[str]) -> Traced:
        return joined(parts, self)

    def replace(self, old: str, new: str, count: Any = -1) -> Traced:
        text = super().replace(old, new, count)
        return joined(self.split(old, count), new) if old else Traced(text)

    def removeprefix(self, prefix: str) -> Traced:
        return self[len(prefix) :] if self.startswith(prefix) else self

    def splitlines(self, keepends: Any = False) -> list[str]:
        whole = self._places(super().splitlines(True), 0)
        return [found[: len(line)] for found, line in zip(whole, super().splitlines(keepends), strict=True)]

    def _places(self, parts: Iterable[str], gap: int) -> list[Traced]:
        """Find `parts` that follow each other in this text: each is the first of its kind behind the one
        before."""
        found, at = [], 0
        for part in parts:
            at = self.find(part, at)
            found.append(self[at : at + len(part)])
            at += len(part) + gap
        return found


def own_text(text: str) -> Traced:
    """Return a text that the template wrote."""
    return Traced(text, b"\1" * len(text))


def traced(value: Any) -> Any:
    """Return a caller's JSON, all of whose texts are marked as not the template's."""
    if isinstance(value, dict):
        return {traced(name): traced(item) for name, item in value.items()}
    if isinstance(value, list):
        return [traced(item) for item in value]
    return Traced(value) if isinstance(value, str) else value


def joined(parts: Iterable[str], between: str = "") -> Traced:
    """Return all of them as one text."""
    texts = [*parts]
    own = _own(between).join(map(_own, texts)) if all(isinstance(part, str) for part in texts) else None
    return Traced(str.join(between, texts), own)


def formatted(form: Callable[..., str], literal: str, *given: Any, **named: Any) -> Traced:
    """Return what `form` makes of `literal` and the others.

    It is called once more with characters that are distinct by their origin, which shows where each one came from.
    """
    text = str(form(*given, **named))
    try:
        again = form(*map(_distinct, given), **{name: _distinct(value) for name, value in named.items()})
    except (AttributeError, LookupError, TypeError, ValueError):
        return Traced(text)
    shown = "".join(chr(ord(char) & 0xFFFF) if char >= chr(_CALLERS) else char for char in again)
    is_own = 0 not in _own(literal)
    own = bytes(char >= chr(_OWN) or (is_own and char <= "\uffff") for char in again)
    return Traced(text, own if shown == text else None)


def _own(text: str) -> bytes:
    return text.own if isinstance(text, Traced) else bytes(len(text))


class _DistinctFields(dict[Any, Any]):
    """A dict whose fields say where their characters come from. Shown as a whole, with its keys, it does not."""

    def __repr__(self) -> str:
        return _UNKNOWN

    __str__ = __repr__


def _distinct(value: Any) -> Any:
    """Return a value whose characters say where they come from."""
    if isinstance(value, str):
        return "".join(
            chr(ord(char) + (_OWN if own else _CALLERS)) if char <= "\uffff" else char
            for char, own in zip(str.__iter__(value), _own(value), strict=True)
        )
    if isinstance(value, tuple | list):
        return type(value)(map(_distinct, value))
    if isinstance(value, dict):
        return _DistinctFields({key: _distinct(item) for key, item in value.items()})
    return value if isinstance(value, int | float | None) else _UNKNOWN


def _cutting(name: str) -> Callable[..., Any]:
    """Make a method whose result is parts of the text, in their order."""
    method = getattr(str, name)

    def cut(self: Traced, *given: Any, **named: Any) -> Any:
        parts = method(self, *given, **named)
        if isinstance(parts, str):
            return self._places([parts], 0)[0]
        between = (*given, named.get("sep"))[0] if "split" in name else None
        return type(parts)(self._places(parts, len(between or "")))

    return cut


def _mapping(name: str) -> Callable[[Traced], Traced]:
    """Make a method that makes other characters of a text's."""
    method = getattr(str, name)

    def mapped(self: Traced) -> Traced:
        text = method(self)
        return Traced(text, self.own if len(text) == len(self) else None)

    return mapped


for _name in ("split", "rsplit", "partition", "rpartition", "strip", "lstrip", "rstrip", "removesuffix"):
    setattr(Traced, _name, _cutting(_name))
for _name in ("lower", "upper", "capitalize", "title", "swapcase", "casefold"):
    setattr(Traced, _name, _mapping(_name))
