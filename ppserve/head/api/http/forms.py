"""The form of an answer in the words of OpenAI and vLLM: `response_format`, `structured_outputs`, `guided_*`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ppserve.errors import InvalidRequest, Violation
from ppserve.grammar.structured_output import Kind, StructuredOutput

JsonValue = str | bool | dict[str, Any]
"""A schema: as it is, or as JSON text."""


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's description of a schema. It is enforced whether it is `strict` or not."""

    name: str | None = None
    description: str | None = None
    schema: bool | dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's form of an answer. type: `text`, `json_object` or `json_schema`."""

    type: str
    json_schema: JsonSchema | None = None


class TextFormat(JsonSchema, kw_only=True):
    """The form of an answer in Responses and Messages, with its schema beside its type."""

    type: str


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's forms of an answer, of which a request has one."""

    json: JsonValue | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None
    """It changes nothing: a form that cannot be enforced is refused, and nothing takes its place."""
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    structural_tag: Any = None


REFUSED = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern", "structural_tag")


@dataclass(frozen=True, slots=True)
class AskedForm:
    """A form, and the field of the body that asks for it."""

    field: str
    output: StructuredOutput


def of_response_format(given: ResponseFormat | None) -> Iterator[AskedForm]:
    """Yield the form that this asks for. Raises InvalidRequest for a type that is not served, or lacks its
    schema."""
    if given is not None:
        schema = None if given.json_schema is None else given.json_schema.schema
        yield from _of_type(given.type, schema, "response_format", "response_format.json_schema.schema")


def of_text_format(home: str, given: TextFormat | None) -> Iterator[AskedForm]:
    """Yield the form that this asks for, as `of_response_format` does. home: the field that has this form."""
    if given is not None:
        yield from _of_type(given.type, given.schema, home, home + ".schema")


def _of_type(kind: str, schema: bool | dict[str, Any] | None, home: str, place: str) -> Iterator[AskedForm]:
    if kind == "json_object":
        yield AskedForm(home, StructuredOutput("json_object"))
    elif kind == "json_schema":
        if schema is None:
            raise InvalidRequest([Violation(place, "missing")])
        yield AskedForm(place, _schema(schema))
    elif kind != "text":
        problem = f"{kind[:100]!r} is not served: text, json_object or json_schema"
        raise InvalidRequest([Violation(home + ".type", problem)])


def of_structured_outputs(given: StructuredOutputs | None) -> Iterator[AskedForm]:
    """Yield the forms that these ask for. Raises InvalidRequest for fields that are not served."""
    if given is None:
        return
    if wrong := [
        Violation(f"structured_outputs.{name}", "not served") for name in REFUSED if getattr(given, name)
    ]:
        raise InvalidRequest(wrong)
    yield from of_kinds("structured_outputs.", given.json, given.regex, given.choice, given.grammar)
    if given.json_object:
        yield AskedForm("structured_outputs.json_object", StructuredOutput("json_object"))


def of_kinds(
    home: str, schema: JsonValue | None, regex: str | None, choice: Sequence[str] | None, grammar: str | None
) -> Iterator[AskedForm]:
    """Return vLLM's kinds of forms, where they ask for something. home: what stands before their names."""
    if schema is not None and schema is not False and schema != "":
        yield AskedForm(home + "json", _schema(schema))
    if choice:
        yield AskedForm(home + "choice", StructuredOutput("choice", _text(choice)))
    kinds: tuple[tuple[Kind, str | None], ...] = (("regex", regex), ("grammar", grammar))
    for kind, source in kinds:
        if source:
            yield AskedForm(home + kind, StructuredOutput(kind, source))


def _schema(schema: JsonValue) -> StructuredOutput:
    return StructuredOutput("json_schema", schema if isinstance(schema, str) else _text(schema))


def _text(value: Any) -> str:
    # Other threads wait meanwhile: json takes 27 ms for a megabyte, msgspec 2.
    return msgspec.json.encode(value).decode()
