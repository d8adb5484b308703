"""Tools in the words of OpenAI's responses: a function has no record of its own, and may lie in a namespace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ppserve.errors import Violation
from ppserve.head.api.answer_parts.tools import Tool, ToolChoice
from ppserve.head.api.http.tools import ALLOWED, CHOICES, FUNCTION, allowing

NAMESPACE = "namespace"
_OWN_NAMESPACE = "functions"
"""A function in this namespace is treated as if it were in none."""


class ResponseTool(msgspec.Struct):
    """A function, or a namespace of functions. A tool of another type is one that OpenAI's servers run."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: list[ResponseTool] | None = None

    def violations(self, place: str) -> Iterator[Violation]:
        if self.type in (FUNCTION, NAMESPACE) and self.name is None:
            yield Violation(f"{place}.name", "missing")
        for number, tool in enumerate(self.tools or () if self.type == NAMESPACE else ()):
            yield from tool.violations(f"{place}.tools[{number}]")


class ResponseToolChoice(msgspec.Struct):
    """A function that must be called, or the tools that may be."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: str | None = None
    tools: list[ResponseToolChoice] | None = None

    @property
    def function(self) -> str | None:
        """The name of a function, as the model knows it; None for a tool of another type."""
        return None if self.type != FUNCTION or self.name is None else full_name(self.name, self.namespace)

    @property
    def choice(self) -> ToolChoice | None:
        """Which tools are called; None for a choice that is not served."""
        if self.type == ALLOWED:
            functions = (tool.function for tool in self.tools or ())
            return allowing(self.mode or "", (name for name in functions if name is not None))
        return None if self.function is None else ToolChoice("required", self.function)


def full_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model knows a function."""
    if namespace in (None, "", _OWN_NAMESPACE):
        return name
    return f"{namespace.rstrip('_')}__{name}"


def functions_of(tools: Sequence[ResponseTool]) -> Iterator[tuple[str | None, ResponseTool]]:
    """Yield all functions with their namespaces."""
    for tool in tools:
        if tool.type == FUNCTION:
            yield None, tool
        elif tool.type == NAMESPACE:
            yield from ((tool.name, each) for each in tool.tools or () if each.type == FUNCTION)


def tool_of(namespace: str | None, function: ResponseTool) -> Tool:
    name = full_name(function.name or "", namespace)
    return Tool(name, function.description, function.parameters, bool(function.strict))


def choice_of(given: str | ResponseToolChoice | None) -> ToolChoice | None:
    """Return which tools are called; None for a choice that is not served."""
    return given.choice if isinstance(given, ResponseToolChoice) else CHOICES.get(given or "auto")


def ignored_tools(given: Any) -> Iterator[str]:
    """Yield the names of tools that are left out. given: the tools as they were sent, of any type."""
    for tool in given if isinstance(given, list) else ():
        if not isinstance(tool, Mapping):
            continue
        if tool.get("type") == NAMESPACE:
            yield from ignored_tools(tool.get("tools"))
        elif tool.get("type") != FUNCTION:
            yield f"tools.{tool.get('type')}"
