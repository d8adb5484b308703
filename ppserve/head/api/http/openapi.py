"""GET /openapi.json: the served paths and the fields of their bodies, as OpenAPI 3.1 has them.

Everything is read from what serves: the table of paths, the types of the bodies and the table of options.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ppserve.head.api.http.bodies import ALL_TOKENS, MIN_SEED, Body
from ppserve.head.api.http.responses import OPENAI_ERRORS, ErrorForm
from ppserve.head.api.request_handler import RequestHandler
from ppserve.head.options import RANGES, GenerationOptions

Endpoint = Callable[[Request, RequestHandler], Awaitable[Response]]

LOWEST = {"seed": MIN_SEED, "top_k": ALL_TOKENS}
"""The least values that HTTP takes of options whose own range begins higher."""
_MEANINGS = {option.name: option.metadata["meaning"] for option in fields(GenerationOptions)}
_PLACES = "#/components/schemas/"
_KEYS = {
    "key": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
"""Either of these is a key."""


@dataclass(frozen=True, slots=True)
class HttpPath:
    """One path that is served by one method."""

    method: str
    path: str
    meaning: str
    answer: Endpoint
    body: type[Body] | None = None
    content: str = "application/json"  # the type of the answer
    is_open: bool = False  # it needs no key
    errors: ErrorForm = OPENAI_ERRORS
    generates: bool = False  # it may end as a stream, and a refusal counts as a request's end


def describe_paths(served: Sequence[HttpPath], version: str, has_keys: bool) -> dict[str, Any]:
    """Return the OpenAPI document of these paths."""
    bodies = [each.body for each in served if each.body is not None]
    _, schemas = msgspec.json.schema_components(bodies, ref_template=_PLACES + "{name}")
    for schema in schemas.values():
        # A struct keeps what it was made of in a field without a name.
        schema.get("properties", {}).pop("", None)
    for body in bodies:
        _describe_fields(schemas[body.__name__], body)
    paths: dict[str, Any] = {}
    for each in served:
        paths.setdefault(each.path.replace(":path", ""), {})[each.method.lower()] = _operation(each, has_keys)
    errors = {each.errors.name: each.errors.schema for each in served}
    components: dict[str, Any] = {"schemas": {**schemas, **errors}}
    if has_keys:
        components["securitySchemes"] = _KEYS
    info = {"title": "ppserve", "version": version, "description": "A field that is null is absent."}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def _describe_fields(schema: dict[str, Any], body: type[Body]) -> None:
    """Say what the options mean and which numbers they take. A field may have another name than its option."""
    for field in msgspec.structs.fields(body):
        described = schema["properties"].get(field.encode_name)
        if field.name not in _MEANINGS or described is None:
            continue
        described["description"] = _MEANINGS[field.name]
        if field.name in RANGES:
            low, high = RANGES[field.name]
            described |= {"minimum": LOWEST.get(field.name, low), "maximum": high}


def _operation(of: HttpPath, has_keys: bool) -> dict[str, Any]:
    content: dict[str, Any] = {of.content: {}}
    if of.generates:
        content["text/event-stream"] = {}
    operation: dict[str, Any] = {
        "summary": of.meaning,
        "parameters": list(_parameters(of.path)),
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "default": {
                "description": "An error.",
                "content": {"application/json": {"schema": {"$ref": _PLACES + of.errors.name}}},
            },
        },
    }
    if of.body is not None:
        schema = {"$ref": _PLACES + of.body.__name__}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if has_keys and not of.is_open:
        operation["security"] = [{name: []} for name in _KEYS]
    return operation


def _parameters(path: str) -> Iterator[dict[str, Any]]:
    for part in path.split("{")[1:]:
        name = part.partition("}")[0].partition(":")[0]
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
