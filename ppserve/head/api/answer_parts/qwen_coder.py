"""Qwen3-Coder's calls: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

A text stands between the tags as it is, and any other value as JSON. Which of them it is, the tool's schema says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
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
NAME_END = ">"
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
        schemas = _properties(calls.schemas.get(name, {}))
        between = "{"
        with suppress(NotACall):  # what is no JSON ends the call
            while (yield from source.next_visible()) == "<" and (yield from source.goes_on_with(PARAMETER)):
                key = yield from source.text_until(NAME_END)
                value = yield from _read_value(source, schemas.get(key))
                yield calls.arguments(f"{between}{json.dumps(key, ensure_ascii=False)}: {value}")
                between = ", "
        if calls.has_arguments:
            yield calls.arguments("}")
        yield from calls.end()

    def calls_after_marker(self, tools: Sequence[Tool], max_calls: int | None) -> FormPart:
        call: FormPart = ["\n", either([_call(tool) for tool in tools]), "\n" + END]
        return call if max_calls == 1 else [call, {"any_number": ["\n" + BEGIN, call]}]


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schemas of the parameters that a schema names. Schemas are read as callers sent them: nobody has
    checked that they are valid."""
    given = schema.get("properties")
    return given if isinstance(given, Mapping) else {}


def _types(schema: Any) -> set[str] | None:
    """The types that a schema names; None if it does not say."""
    given = schema.get("type") if isinstance(schema, Mapping) else None
    names = {each for each in (given if isinstance(given, list) else [given]) if isinstance(each, str)}
    return names or None


def _choices(schema: Any) -> list[Any]:
    given = schema.get("enum") if isinstance(schema, Mapping) else None
    return given if isinstance(given, list) else []


def _read_value(source: Source, schema: Any) -> Parsing[str]:
    """Read a parameter's value, and over its end. Return it as JSON. Raises AnswerEnds and NotACall."""
    types = _types(schema)
    if types is not None and types <= {"object", "array"} and (yield from source.next_visible()) in "{[":
        text = yield from source.json()  # which may have the end's mark in its strings
        yield from source.text_until(PARAMETER_END)
    else:
        text = yield from source.text_until(PARAMETER_END)
        text = text.removeprefix("\n").removesuffix("\n")
    if types != {"string"} and schema is not None and text not in _choices(schema):
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
    """Return the form of a tool's call. Raises InvalidRequest for a schema that this format cannot force."""
    parameters = _valid_parameters(tool) if tool.strict else _any_parameters(tool)
    return [f"{FUNCTION}{tool.name}>\n", *parameters, FUNCTION_END]


def _any_parameters(tool: Tool) -> Iterator[FormPart]:
    """Yield the form of parameters that need not be valid: those that the schema names, or any if it names none.

    The end of an object or a list is where its JSON ends, as it is for the reader.
    """
    named: list[FormPart] = []
    for name, schema in _properties(tool.schema).items():
        if NAME_END in name:
            continue
        types = _types(schema)
        value: FormPart = {"until": PARAMETER_END}
        if types is not None and types <= {"object", "array"}:
            value = [{"schema": {"type": sorted(types)}, "of": f"the parameter {name!r}"}, "\n" + PARAMETER_END]
        named.append([f"{PARAMETER}{name}{NAME_END}\n", value, "\n"])
    any_name: FormPart = [PARAMETER, {"until": NAME_END}, {"until": PARAMETER_END}, "\n"]
    yield {"any_number": either(named or [any_name])}


def _valid_parameters(tool: Tool) -> Iterator[FormPart]:
    """Yield the forms of the parameters in the schema's order."""
    schema = tool.schema
    if others := schema.keys() - ANNOTATIONS - {"type", "properties", "required", "additionalProperties"}:
        raise _refusal(tool, sorted(others)[0])
    properties, required = schema.get("properties", {}), schema.get("required", [])
    for name, given, kind in (("properties", properties, Mapping), ("required", required, list)):
        if not isinstance(given, kind):
            raise _refusal(tool, name)
    known = [name for name in properties if NAME_END not in name]
    if wrong := [name for name in (*required, *properties) if name not in known]:
        raise _refusal(tool, str(wrong[0]))
    for name, each in properties.items():
        part: FormPart = [f"{PARAMETER}{name}{NAME_END}\n", _value(tool, name, each), "\n"]
        yield part if name in required else {"maybe": part}


def _value(tool: Tool, name: str, schema: Any) -> FormPart:
    """Return the form of a parameter's value, with its end."""
    types, end = _types(schema), "\n" + PARAMETER_END
    if types == {"string"} and schema.keys() <= {"type", *ANNOTATIONS}:
        return {"until": PARAMETER_END}
    choices = _choices(schema)
    if choices and all(isinstance(each, str) and PARAMETER_END not in each for each in choices):
        if schema.keys() <= {"type", "enum", *ANNOTATIONS} and types in (None, {"string"}):
            return [either(choices), end]
    elif types and (types <= {"object", "array"} or types <= JSON_TYPES - {"object", "array"}):
        return [{"schema": schema, "of": f"the parameter {name!r} of {tool.name!r}"}, end]
    raise _refusal(tool, name)


def _refusal(tool: Tool, what: str) -> InvalidRequest:
    problem = f"{what[:100]!r} in the parameters of {tool.name!r} cannot be forced in Qwen3-Coder's format"
    return InvalidRequest([Violation("tools", problem)])
