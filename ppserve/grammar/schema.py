"""The JSON Schemas that are enforced. They are checked before llguidance sees them.

The dialect is draft 2020-12. Annotations are accepted. A keyword that is not enforced is refused by its name,
whether llguidance refuses it, would ignore it, or would enforce it less strictly than the draft says. `format` is
enforced, although the draft takes it for an annotation by default.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from ppserve.grammar.pattern import translated
from ppserve.grammar.structured_output import FormRefused

MAX_DEPTH = 64
"""How deep schemas may lie within each other."""
MAX_SCHEMAS = 10_000
MAX_OPTIONS = 10_000
"""The most values of an `enum`, and the most schemas of an `anyOf`, `oneOf` or `allOf`."""
MAX_COUNT = 10_000
"""The highest limit of a length or of a number of items or properties."""
MAX_NUMBER = 2**53
"""llguidance counts with float64, in which integers beyond this one are not exact."""
MAX_FRACTION_DIGITS = 15

ANNOTATIONS = frozenset(
    {
        *("$comment", "$id", "$schema", "title", "description", "default", "examples", "deprecated", "readOnly"),
        *("writeOnly", "contentEncoding", "contentMediaType", "contentSchema", "discriminator", "example"),
    }
)
"""Keywords that demand nothing of a value. `discriminator` and `example` are OpenAPI's."""
DEMANDS_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "nullable": (False,),
    "propertyNames": (True, {}, {"type": "string"}),  # zod writes the last one for every record
}
"""Values with which a keyword that is not enforced demands nothing of a value."""
DRAFTS = re.compile(r"https?://json-schema\.org/(draft/2020-12|draft/2019-09|draft-0[67])/schema#?")
TYPES = ("null", "boolean", "object", "array", "number", "string", "integer")

_DAY = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
)
_LEAP_YEAR = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = r"(?:000[1-9]|00[1-9]\d|0[1-9]\d\d|[1-9]\d{3})"
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?(?:[zZ]|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
OWN_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[tT]{_TIME}$"}
"""These take the place of llguidance's own, which accept days and seconds that do not exist. They have no leap
second, and no year 0."""
FORMATS = frozenset({"duration", "email", "ipv4", "ipv6", "uuid", "uri"})
"""These formats of llguidance accept nothing that is wrong."""


def enforced(schema: Any) -> Any:
    """Return the schema with what llguidance has to enforce, and nothing else. Raises FormRefused."""
    checking = _Checking()
    found = checking.schema(schema, "", 0)
    checking.check_references()
    return found


class _Checking:
    """Walks through a schema, and remembers where schemas are and which of them are referred to."""

    def __init__(self) -> None:
        self._places: set[str] = set()
        self._references: dict[str, str] = {}

    def schema(self, schema: Any, pointer: str, depth: int) -> Any:
        self._places.add(pointer)
        if depth > MAX_DEPTH:
            raise FormRefused(f"schemas lie within each other more than {MAX_DEPTH} deep", pointer)
        if len(self._places) > MAX_SCHEMAS:
            raise FormRefused(f"there are more than {MAX_SCHEMAS} schemas", pointer)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise FormRefused("is no schema: neither an object nor a boolean", pointer)
        found: dict[str, Any] = {}
        for keyword, value in schema.items():
            place = f"{pointer}/{_escaped(keyword)}"
            if keyword in ANNOTATIONS:
                _check_annotation(keyword, value, pointer, place)
            elif keyword in _VALUES:
                _VALUES[keyword](found, keyword, value, place)
            elif keyword in _SCHEMAS:
                found[keyword] = _SCHEMAS[keyword](self, value, place, depth + 1)
            elif keyword == "$ref":
                found[keyword] = self._reference(value, place)
            elif any(type(value) is type(each) and value == each for each in DEMANDS_NOTHING.get(keyword, ())):
                continue
            elif not keyword.startswith("x-") or keyword == "x-guidance":
                raise FormRefused(f"the keyword {keyword[:100]!r} is not enforced here", place, keyword)
        _check_together(found, pointer)
        return found

    def one(self, value: Any, place: str, depth: int) -> Any:
        return self.schema(value, place, depth)

    def listed(self, value: Any, place: str, depth: int) -> Any:
        keyword = place.rpartition("/")[2]
        if not isinstance(value, list) or not value:
            raise FormRefused("is no list of schemas", place, keyword)
        if len(value) > MAX_OPTIONS:
            raise FormRefused(f"has {len(value)} schemas; the limit is {MAX_OPTIONS}", place, keyword)
        return [self.schema(each, f"{place}/{index}", depth) for index, each in enumerate(value)]

    def named(self, value: Any, place: str, depth: int) -> Any:
        if not isinstance(value, dict):
            raise FormRefused("is no object of schemas", place, place.rpartition("/")[2])
        return {name: self.schema(each, f"{place}/{_escaped(name)}", depth) for name, each in value.items()}

    def by_pattern(self, value: Any, place: str, depth: int) -> Any:
        keyword = "patternProperties"
        found = self.named(value, place, depth)
        translations = [_pattern(name, f"{place}/{_escaped(name)}", keyword) for name in found]
        if len({*translations}) < len(found):
            raise FormRefused("two expressions mean the same", place, keyword)
        return dict(zip(translations, found.values(), strict=True))

    def _reference(self, value: Any, place: str) -> str:
        """Check a reference. llguidance resolves it as this does: within this schema, by a JSON pointer."""
        if not isinstance(value, str) or not re.fullmatch(r"#(/.*)?", value, re.DOTALL):
            problem = "only references within the schema, by a JSON pointer (#/...), are enforced"
            raise FormRefused(problem, place, "$ref")
        self._references[place] = unquote(value[1:])
        return value

    def check_references(self) -> None:
        """Raise FormRefused for a reference to a place that is no schema, like an example: nobody has checked
        it."""
        for place, target in self._references.items():
            if target not in self._places:
                raise FormRefused(f"there is no schema at #{target[:100]}", place, "$ref")
            if "/patternProperties/" in target:
                raise FormRefused("a reference to one of patternProperties is not enforced", place, "$ref")


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _check_annotation(keyword: str, value: Any, pointer: str, place: str) -> None:
    """Raise FormRefused for two annotations that change what a schema means: `$id` in the middle of it, which
    moves the references there, and another draft."""
    if keyword == "$id" and pointer:
        raise FormRefused("is enforced only at the top", place, keyword)
    if keyword == "$schema" and not (isinstance(value, str) and DRAFTS.fullmatch(value)):
        raise FormRefused("names a dialect that is not served; draft 2020-12 is", place, keyword)


def _pattern(value: Any, place: str, keyword: str) -> str:
    if not isinstance(value, str):
        raise FormRefused("is no string", place, keyword)

    def refusal(problem: str) -> FormRefused:
        return FormRefused(f"the expression {value[:100]!r}: {problem}", place, keyword)

    return translated(value, refusal)


def _take_type(found: dict[str, Any], keyword: str, value: Any, place: str) -> None:
    types = value if isinstance(value, list) else [value]
    if not types or any(each not in TYPES for each in types) or len({*types}) < len(types):
        raise FormRefused(f"is none of {', '.join(TYPES)}, and no list of such", place, keyword)
    found[keyword] = value


def _take_count(found: dict[str, Any], keyword: str, value: Any, place: str) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and value > MAX_COUNT:  # infinity too, which is no integer
        raise FormRefused(f"is {value}; the limit is {MAX_COUNT}", place, keyword)
    if not is_number or value < 0 or value != int(value):
        raise FormRefused("is no whole number of at least 0", place, keyword)
    found[keyword] = int(value)


def _take_number(found: dict[str, Any], keyword: str, value: Any, place: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FormRefused("is no number", place, keyword)
    _check_number(value, place, keyword)
    found[keyword] = int(value) if value == int(value) else value


def _take_multiple(found: dict[str, Any], keyword: str, value: Any, place: str) -> None:
    _take_number(found, keyword, value, place)
    if value <= 0:
        raise FormRefused("is not above 0", place, keyword)


def _check_number(value: float, place: str, keyword: str) -> None:
    """Raise FormRefused for a number that llguidance would not write as it is."""
    if not -MAX_NUMBER <= value <= MAX_NUMBER:
        raise FormRefused("is beyond 2**53, so it is not enforced exactly", place, keyword)
    if value != int(value) and abs(value) < 10**-MAX_FRACTION_DIGITS:
        raise FormRefused(f"has more than {MAX_FRACTION_DIGITS} digits behind the point", place, keyword)


def _take_pattern(found: dict[str, Any], keyword: str, value: Any, place: str) -> None:
    found[keyword] = _pattern(value, place, keyword)


def _take_format(found: dict[str, Any], keyword: str, value: Any, place: str) -> None:
    if not isinstance(value, str):
        raise FormRefused("is no string", place, keyword)
    if value not in FORMATS and value not in OWN_FORMATS:
        known = ", ".join(sorted({*FORMATS, *OWN_FORMATS}))
        raise FormRefused(f"{value[:100]!r} is not enforced here; enforced are {known}", place, keyword)
    found[keyword] = value


def _take_required(found: dict[str, Any], keyword: str, value: Any, place: str) -> None:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise FormRefused("is no list of names", place, keyword)
    found[keyword] = value


def _take_enum(found: dict[str, Any], keyword: str, value: Any, place: str) -> None:
    if not isinstance(value, list) or not value:
        raise FormRefused("is no list of values", place, keyword)
    if len(value) > MAX_OPTIONS:
        raise FormRefused(f"has {len(value)} values; the limit is {MAX_OPTIONS}", place, keyword)
    found[keyword] = [_value(each, f"{place}/{index}", keyword) for index, each in enumerate(value)]


def _take_const(found: dict[str, Any], keyword: str, value: Any, place: str) -> None:
    found[keyword] = _value(value, place, keyword)


def _value(value: Any, place: str, keyword: str) -> Any:
    """Return a value that can be written in one way only, but for spaces between its parts. Raises FormRefused."""
    match value:
        case str():
            if re.search("[\0-\x07\x0b\x0e-\x1f\x7f\ud800-\udfff]", value):
                raise FormRefused("has a control character, which answers cannot have", place, keyword)
        case int() | float() if not isinstance(value, bool):
            _check_number(value, place, keyword)
            return int(value) if value == int(value) else value
        case list():
            return [_value(each, f"{place}/{index}", keyword) for index, each in enumerate(value)]
        case dict():
            return {name: _value(each, f"{place}/{_escaped(name)}", keyword) for name, each in value.items()}
    return value


def _check_together(found: dict[str, Any], pointer: str) -> None:
    """Refuse what llguidance would not enforce together with other keywords, and make patterns of our own
    formats."""
    least = found.get("minProperties", 0)
    if least > len({*found.get("required", ())}) + 1:
        # The names of other properties may be repeated, and each repetition would count.
        problem = "is enforced only up to one more than there are required names"
        raise FormRefused(problem, f"{pointer}/minProperties", "minProperties")
    if (own := OWN_FORMATS.get(found.get("format", ""))) is not None:
        del found["format"]
        exact = {"pattern": translated(own, FormRefused)}
        found["allOf"] = [*found.get("allOf", ()), exact]


_VALUES: Mapping[str, Callable[[dict[str, Any], str, Any, str], None]] = {
    "type": _take_type,
    "const": _take_const,
    "enum": _take_enum,
    "required": _take_required,
    "pattern": _take_pattern,
    "format": _take_format,
    **dict.fromkeys(("minItems", "maxItems", "minProperties", "maxProperties"), _take_count),
    **dict.fromkeys(("minLength", "maxLength"), _take_count),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _take_number),
    "multipleOf": _take_multiple,
}
_SCHEMAS: Mapping[str, Callable[[_Checking, Any, str, int], Any]] = {
    **dict.fromkeys(("anyOf", "allOf", "oneOf", "prefixItems"), _Checking.listed),
    **dict.fromkeys(("properties", "$defs", "definitions"), _Checking.named),
    "patternProperties": _Checking.by_pattern,
    **dict.fromkeys(("items", "additionalProperties"), _Checking.one),
}
