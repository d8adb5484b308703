"""The interface of a format of calls: how answers with calls are read, and what valid calls look like.

A form is JSON as `ppserve.grammar.sequence` reads it. Special tokens stand in it by their texts.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from ppserve.head.api.answer_parts.json_calls import Calls
from ppserve.head.api.answer_parts.source import Parsing, Source
from ppserve.head.api.answer_parts.tools import Tool

FormPart = str | list[Any] | dict[str, Any]

ANY_TEXT: FormPart = {"text": "any"}
NO_JSON: FormPart = {"text": "no_json"}


class ToolFormat(ABC):
    """One way in which models write calls of tools."""

    name: ClassVar[str]
    """The operator's word for it (`--tool-format`)."""
    marker: ClassVar[str] = ""
    """What stands in front of a call."""
    special: ClassVar[tuple[str, ...]] = ()
    """The texts of tokens that it is written with, where they are special ones."""

    @abstractmethod
    def is_shown_by(self, template: str) -> bool:
        """Return whether a chat template writes calls in this format."""

    @abstractmethod
    def read(self, source: Source, calls: Calls) -> Parsing[None]:
        """Read an answer to its end. Raises AnswerEnds and NotACall."""

    @abstractmethod
    def calls_after_marker(self, tools: Sequence[Tool], max_calls: int | None) -> FormPart:
        """Return the form of calls of these tools, without the marker in front of the first. Arguments of a tool
        that is strict are valid by its schema."""

    def calls(self, tools: Sequence[Tool], max_calls: int | None) -> FormPart:
        """Return the form of an answer that is calls and nothing else: at least one."""
        return [self.marker, self.calls_after_marker(tools, max_calls)]

    def text_and_calls(self, tools: Sequence[Tool], max_calls: int | None) -> FormPart:
        """Return the form of an answer that may have text and calls."""
        marked: FormPart = [{"until": self.marker}, self.calls_after_marker(tools, max_calls)]
        return either([marked, ANY_TEXT]) if max_calls == 1 else [{"any_number": marked}, ANY_TEXT]

    def calls_or_text(self, tools: Sequence[Tool], max_calls: int | None, text: FormPart) -> FormPart:
        """Return the form of an answer that is calls and nothing else, or JSON: `text`. Raises InvalidRequest."""
        return {"either": [self.calls(tools, max_calls), text]}


def arguments_of(tool: Tool) -> FormPart:
    """Return the form of the tool's arguments: any object, unless the tool is strict."""
    schema = tool.schema if tool.strict else {"type": "object"}
    return {"schema": schema, "of": f"the parameters of {tool.name!r}"}


def json_object(tool: Tool, key: str = "arguments") -> FormPart:
    """Return the form of a call as a JSON object. key: the name of its arguments."""
    return [f'{{"name": {json.dumps(tool.name)}, "{key}": ', arguments_of(tool), "}"]


def either(forms: Sequence[FormPart]) -> FormPart:
    """Return the form of a text that has one of these forms."""
    return forms[0] if len(forms) == 1 else {"either": [*forms]}
