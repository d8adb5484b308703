"""Random tools whose calls have a bounded length."""

from __future__ import annotations

import random
from typing import Any

from ppserve.errors import InvalidRequest
from ppserve.head.api.answer_parts.formats import FormatNames, answer_format
from ppserve.head.api.answer_parts.tools import Tool, ToolChoice, Tooling

WORDS = ("city", "day", "count", "unit", "query", "path", "limit", "colour", "tags", "range", "note", "point")


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of arguments, or of one of them, whose values have a bounded length."""
    kinds = ["string", "integer", "number", "boolean", "enum", "pattern", "either"]
    if depth < 3:
        kinds += ["object", "array"]
    kind = "object" if depth == 0 else rng.choice(kinds)
    match kind:
        case "object":
            names = rng.sample(WORDS, rng.randint(0 if depth == 0 else 1, 4))
            return {
                "type": "object",
                "properties": {name: random_schema(rng, depth + 1) for name in names},
                "required": [name for name in names if rng.random() < 0.8],
                "additionalProperties": False,
            }
        case "array":
            return {"type": "array", "items": random_schema(rng, depth + 1), "maxItems": rng.randint(1, 3)}
        case "string":
            return {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(4, 16)}
        case "integer":
            return {"type": "integer", "minimum": rng.randint(-50, 0), "maximum": rng.randint(1, 5000)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": 10}
        case "enum":
            return {"enum": rng.sample([*WORDS, 1, None, True], 3)}
        case "pattern":
            return {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}$"}
        case "either":
            return {"anyOf": [{"type": "null"}, random_schema(rng, depth + 1)]}
    return {"type": kind}


def random_tools(rng: random.Random, count: int, name: str) -> list[Tool]:
    """Tools whose calls can be forced in the format of this name."""
    found: list[Tool] = []
    while len(found) < count:
        parameters = random_schema(rng) if rng.random() < 0.9 else None
        tool = Tool(f"{rng.choice(WORDS)}_{len(found)}", "Does it.", parameters)
        try:
            answer_format("", {}, FormatNames(name)).plan(Tooling((tool,), ToolChoice("required")), "")
        except InvalidRequest:  # tags have no values of every kind
            continue
        found.append(tool)
    return found
