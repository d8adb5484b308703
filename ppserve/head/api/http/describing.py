"""The paths that describe the model, and turn text into tokens and back."""

from __future__ import annotations

import re
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ppserve.errors import Draining
from ppserve.head.api.http.answers import token_name
from ppserve.head.api.http.bodies import Body, check_model, read_body
from ppserve.head.api.http.responses import JsonResponse
from ppserve.head.api.request_handler import NOT_SERVING, RequestHandler, run_in_thread_if_long

_STARTED_S = int(time.time())


class TokenizeBody(Body, kw_only=True):
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body, kw_only=True):
    tokens: list[int]


async def health(_request: Request, handler: RequestHandler) -> Response:
    """GET /health."""
    if not handler.is_serving:
        raise Draining(NOT_SERVING)
    return JsonResponse({})


async def models(_request: Request, handler: RequestHandler) -> Response:
    """GET /v1/models."""
    served = handler.description
    names = dict.fromkeys((served.name, *served.aliases))
    return JsonResponse({"object": "list", "data": [_model(name, handler) for name in names]})


async def model(request: Request, handler: RequestHandler) -> Response:
    """GET /v1/models/NAME."""
    name = request.path_params["name"]
    check_model(name, handler)
    return JsonResponse(_model(name, handler))


async def version(_request: Request, handler: RequestHandler) -> Response:
    """GET /version."""
    description = handler.description
    return JsonResponse({"version": description.version, "system_fingerprint": description.fingerprint})


async def tokenize(request: Request, handler: RequestHandler) -> Response:
    """POST /tokenize. The texts of special tokens become those tokens, as evaluation harnesses need it."""
    body = await read_body(request, TokenizeBody, handler)
    longest_first = sorted(handler.tokenizer.special_ids, key=len, reverse=True)
    special = "|".join(map(re.escape, longest_first)) or "(?!)"
    parts = re.split(f"({special})", body.prompt)
    ids = await handler.tokenize("prompt", *parts, surrounds=body.add_special_tokens is not False)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": handler.description.max_context, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = await run_in_thread_if_long(
            len(ids), lambda: [token_name(handler.tokenizer.token_bytes(i)) for i in ids]
        )
    return JsonResponse(answer)


async def detokenize(request: Request, handler: RequestHandler) -> Response:
    """POST /detokenize. Special tokens show their text."""
    body = await read_body(request, DetokenizeBody, handler)
    _, content = await handler.detokenize("tokens", body.tokens)
    return JsonResponse({"prompt": content.decode("utf-8", "replace")})


async def tokenizer_info(_request: Request, handler: RequestHandler) -> Response:
    """GET /tokenizer_info."""
    return JsonResponse(handler.tokenizer_config())


def _model(name: str, handler: RequestHandler) -> dict[str, Any]:
    description = handler.description
    return {
        "id": name,
        "object": "model",
        "created": _STARTED_S,
        "owned_by": "ppserve",
        "root": description.root,
        "parent": None,
        "max_model_len": description.max_context,
    }
