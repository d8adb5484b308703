"""Tools as a request offers them, in the words of no protocol."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ppserve.errors import Violation

MAX_TOOLS = 128
NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
"""The names that a tool may have: every format can write and read them."""

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function of the caller's that the model may call."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    """The JSON Schema of its arguments; None if it has no arguments."""
    strict: bool = False
    """Whether a call of it must be valid by the schema, also where the model need not call."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """The schema that its arguments must fit, which are an object."""
        return NO_PARAMETERS if self.parameters is None else {**self.parameters, "type": "object"}

    @property
    def may_be_object(self) -> bool:
        """Whether the parameters, as they were given, say that arguments are an object, or do not say."""
        kind = (self.parameters or {}).get("type")
        return kind is None or "object" in (kind if isinstance(kind, list) else [kind])

    def for_template(self) -> dict[str, Any]:
        """Return OpenAI's record of it, which chat templates show."""
        told = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {name: value for name, value in told.items() if value is not None}}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether tools are called: as the model decides (`auto`), at least one (`required`), or none.

    name: the one tool that must be called, and called once; it is set only with `required`.
    allowed: the names of the tools that may be called, of those that the template shows; None if all may be.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    allowed: tuple[str, ...] | None = None

    @property
    def names(self) -> tuple[str, ...] | None:
        """The names of the tools that can be called; None if all that are offered can be."""
        return self.allowed if self.name is None else (self.name,)


@dataclass(frozen=True, slots=True)
class Tooling:
    """The tools that a request offers, and how they may be called."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice()
    parallel: bool = True
    """Whether one answer may have several calls."""

    @property
    def offered(self) -> tuple[Tool, ...]:
        """The tools that the template shows, and whose calls are read back."""
        return () if self.choice.mode == "none" else self.tools

    @property
    def is_forced(self) -> bool:
        return self.choice.mode == "required"

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that can be called: all that are offered, or those that the choice names."""
        names = self.choice.names
        return tuple(tool for tool in self.offered if names is None or tool.name in names)

    @property
    def max_calls(self) -> int | None:
        """How many calls an answer may have; None if it may have any number."""
        return 1 if self.choice.name is not None or not self.parallel else None

    def violations(self, function: str = "", parameters: str = "parameters") -> Iterator[Violation]:
        """Yield the mistakes. function: what stands between a tool and its name in the protocol's fields.
        parameters: the protocol's name of a tool's schema."""
        names = [tool.name for tool in self.tools]
        if len(names) > MAX_TOOLS:
            yield Violation("tools", f"{len(names)} tools; the limit is {MAX_TOOLS}")
            return
        for place, name in enumerate(names):
            if not NAME.fullmatch(name):
                yield Violation(f"tools[{place}]{function}.name", "not 1 to 128 letters, digits or any of _.:/-")
            elif name in names[:place]:
                yield Violation(f"tools[{place}]{function}.name", f"there are two tools {name!r}")
            if not self.tools[place].may_be_object:
                yield Violation(f"tools[{place}]{function}.{parameters}.type", "arguments are an object")
        if self.is_forced and not self.tools:
            yield Violation("tool_choice", "only with tools")
        elif self.choice.names == ():
            yield Violation("tool_choice", "allows none of the tools that are served")
        for name in self.choice.names or ():
            if name not in names:
                yield Violation("tool_choice", f"there is no tool {name[:100]!r}")


NO_TOOLS = Tooling()
