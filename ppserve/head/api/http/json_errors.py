"""What msgspec says of a body that does not fit its fields, in JSON's words instead of Python's."""

from __future__ import annotations

import re

from ppserve.errors import Violation

_PATH = re.compile(r"\$\.?([^`]*)`$")
_FIELD = re.compile("(?:required|unknown) field `([^`]*)`")
_JSON_TYPES = {
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_KIND = f"(?:{'|'.join(_JSON_TYPES)})"
_TYPES = re.compile(rf"Expected `({_KIND}(?: \| {_KIND})*)`, got `({_KIND})`")


def violation_of(problem: str) -> Violation:
    """Return the field and the problem that msgspec's text names."""
    parts = [found[1] for found in (_PATH.search(problem), _FIELD.search(problem)) if found and found[1]]
    return Violation(".".join(parts).removesuffix("[...]") or "body", _in_words(problem.partition(" - at `")[0]))


def _in_words(problem: str) -> str:
    if found := _FIELD.search(problem):
        return "missing" if found[0].startswith("required") else "no field is called so here"
    if found := _TYPES.fullmatch(problem):
        wanted = [_JSON_TYPES[kind] for kind in found[1].split(" | ") if kind != "null"]
        return f"must be {' or '.join(wanted)}, not {_JSON_TYPES[found[2]]}"
    return problem
