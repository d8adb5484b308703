"""The parts of an answer, in their order. A text, a reasoning and the arguments of a call come in pieces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AnswerText:
    """A piece of the answer's text, as the caller reads it."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The model calls a tool."""

    index: int  # of the call in its answer, from 0
    id: str  # a function of the request and the index, so a resumed answer has it again
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments, as JSON text. Every call has at least one."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call has all of its arguments. It is missing where the answer is cut within them."""

    index: int


Part = AnswerText | Reasoning | CallBegin | CallArguments | CallEnd


def merged(parts: Iterable[Part]) -> list[Part]:
    """Return the parts; neighbours of one kind are one piece."""
    found: list[Part] = []
    for part in parts:
        match found[-1] if found else None, part:
            case AnswerText(text=before), AnswerText(text=text):
                found[-1] = AnswerText(before + text)
            case Reasoning(text=before), Reasoning(text=text):
                found[-1] = Reasoning(before + text)
            case CallArguments(index=index, text=before), CallArguments(text=text):
                found[-1] = CallArguments(index, before + text)
            case _:
                found.append(part)
    return found
