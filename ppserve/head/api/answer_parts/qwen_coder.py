"""Qwen3-Coder's calls: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

A text stands between the tags as it is, and any other value as JSON. Which of them it is, the tool's schema says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from ppserve.errors import InvalidRequest, Violation
from ppserve.head.api.answer_parts.hermes import BEGIN, END, Hermes
from ppserve.head.api.answer_parts.json_calls import Calls
from ppserve.head.api.answer_parts.source import NotACall, Parsing, Source
from ppserve.head.api.answer_parts.tool_format import FormPart, either
from ppserve.head.api.answer_parts.tools import Tool

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
JSON_TYPES = {"integer", "number", "boolean", "null", "object", "array"}
ANNOTATIONS = {"title", "description", "default", "examples"}
PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Words that models write for JSON's."""


class QwenCoder(Hermes):
    """Tags within Hermes' tags. Text may stand in front of, between and behind calls."""

    name = "qwen3coder"

    def is_shown_by(self, template: str) -> bool:
        return BEGIN in template and FUNCTION in template and PARAMETER in template

    def read_calls(self, source: Source, calls: Calls) -> Parsing[None]:
        yield from source.next_visible()
        if not (yield from source.starts_with(FUNCTION)):
            raise NotACall
        name = yield from source.word()
        if not name or not (yield from source.starts_with(">")):
            raise NotACall
        yield calls.begin(source, name)
        schemas = calls.schemas.get(name, {}).get("properties", {})
        between = "{"
        with suppress(NotACall):  # what is no JSON ends the call
            while (yield from source.next_visible()) == "<" and (yield from source.starts_with(PARAMETER)):
                key = yield from source.text_until(">")
                value = yield from _read_value(source, schemas.get(key))
                yield calls.arguments(f"{between}{json.dumps(key, ensure_ascii=False)}: {value}")
                between = ", "
        if calls.has_arguments:
            yield calls.arguments("}")
        yield from calls.end()

    def calls_after_marker(self, tools: Sequence[Tool], max_calls: int | None) -> FormPart:
        call: FormPart = ["\n", either([_call(tool) for tool in tools]), "\n" + END]
        return call if max_calls == 1 else [call, {"any_number": ["\n" + BEGIN, call]}]


def _types(schema: Any) -> set[str] | None:
    """The types that a schema names; None if it does not say."""
    given = schema.get("type") if isinstance(schema, Mapping) else None
    return None if given is None else {given} if isinstance(given, str) else {*given}


def _read_value(source: Source, schema: Any) -> Parsing[str]:
    """Read a parameter's value, and over its end. Return it as JSON. Raises AnswerEnds and NotACall."""
    types = _types(schema)
    if types is not None and types <= {"object", "array"} and (yield from source.next_visible()) in "{[":
        text = yield from source.json()  # which may have the end's mark in its strings
        yield from source.text_until(PARAMETER_END)
    else:
        text = yield from source.text_until(PARAMETER_END)
        text = text.removeprefix("\n").removesuffix("\n")
    choices = schema.get("enum", ()) if isinstance(schema, Mapping) else ()
    if types != {"string"} and schema is not None and text not in choices:
        word = PYTHON.get(text.strip(), text.strip())
        if _is_json(word):
            return word
    return json.dumps(text, ensure_ascii=False)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _call(tool: Tool) -> FormPart:
    """Return the form of a tool's call: its parameters in the schema's order. Raises InvalidRequest for a schema
    that this format cannot force."""
    schema = tool.schema
    if others := schema.keys() - ANNOTATIONS - {"type", "properties", "required", "additionalProperties"}:
        raise _refusal(tool, sorted(others)[0])
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if missing := [name for name in required if name not in properties]:
        raise _refusal(tool, missing[0])
    parameters: list[FormPart] = []
    for name, each in properties.items():
        part: FormPart = [f"{PARAMETER}{name}>\n", _value(tool, name, each), "\n"]
        parameters.append(part if name in required else {"maybe": part})
    return [f"{FUNCTION}{tool.name}>\n", *parameters, FUNCTION_END]


def _value(tool: Tool, name: str, schema: Any) -> FormPart:
    """Return the form of a parameter's value, with its end."""
    types, end = _types(schema), "\n" + PARAMETER_END
    if types == {"string"} and schema.keys() <= {"type", *ANNOTATIONS}:
        return {"until": PARAMETER_END}
    choices = schema.get("enum") if isinstance(schema, Mapping) else None
    if choices and all(isinstance(each, str) and PARAMETER_END not in each for each in choices):
        if schema.keys() <= {"type", "enum", *ANNOTATIONS} and types in (None, {"string"}):
            return [either(choices), end]
    elif types and (types <= {"object", "array"} or types <= JSON_TYPES - {"object", "array"}):
        return [{"schema": schema, "of": f"the parameter {name!r} of {tool.name!r}"}, end]
    raise _refusal(tool, name)


def _refusal(tool: Tool, what: str) -> InvalidRequest:
    problem = f"{what[:100]!r} in the parameters of {tool.name!r} cannot be forced in Qwen3-Coder's format"
    return InvalidRequest([Violation("tools", problem)])
