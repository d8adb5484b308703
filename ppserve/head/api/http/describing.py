"""The paths that describe the model, and turn text into tokens and back."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from ppserve.errors import InvalidRequest, Violation
from ppserve.head.api.http.exchange import Exchange
from ppserve.head.api.http.fields import check_model
from ppserve.head.api.http.logprobs import token_name
from ppserve.head.api.request_handler import RequestHandler, run_in_thread_if_long
from ppserve.head.api.requests import check_text

_encode = msgspec.json.Encoder().encode
_STARTED_S = int(time.time())


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Of /tokenize. return_token_strs: vLLM's."""

    prompt: str
    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Of /detokenize."""

    tokens: list[int]
    model: str | None = None


_tokenize_body = msgspec.json.Decoder(TokenizeBody)
_detokenize_body = msgspec.json.Decoder(DetokenizeBody)


async def models(exchange: Exchange, request_handler: RequestHandler) -> None:
    """GET /v1/models."""
    await exchange.answer(_encode({"object": "list", "data": [_model(request_handler)]}))


async def model(exchange: Exchange, request_handler: RequestHandler) -> None:
    """GET /v1/models/NAME."""
    check_model(exchange.path_parameter("name"), request_handler.description.name)
    await exchange.answer(_encode(_model(request_handler)))


async def version(exchange: Exchange, request_handler: RequestHandler) -> None:
    """GET /version."""
    description = request_handler.description
    await exchange.answer(_encode({"version": description.version, "system_fingerprint": description.fingerprint}))


async def tokenize(exchange: Exchange, request_handler: RequestHandler) -> None:
    """POST /tokenize. Other than in a prompt, the text of the end-of-text token is that token: this is how
    evaluation harnesses ask for its number."""
    body = await exchange.read(_tokenize_body)
    check_model(body.model, request_handler.description.name)
    check_text("prompt", body.prompt, request_handler.description)
    special = _end_of_text(request_handler)
    ids = await request_handler.tokenize("prompt", *(body.prompt.split(special) if special else [body.prompt]))
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": request_handler.description.max_context,
        "tokens": ids,
    }
    if body.return_token_strs:
        answer["token_strs"] = await run_in_thread_if_long(
            len(ids), lambda: [token_name(request_handler.token_bytes(i)) for i in ids]
        )
    await exchange.answer(_encode(answer))


async def detokenize(exchange: Exchange, request_handler: RequestHandler) -> None:
    """POST /detokenize. Special tokens show their text."""
    body = await exchange.read(_detokenize_body)
    check_model(body.model, request_handler.description.name)
    _, content = await request_handler.detokenize("tokens", body.tokens)
    await exchange.answer(_encode({"prompt": content.decode("utf-8", "replace")}))


async def tokenizer_info(chat_template: str | None, exchange: Exchange, request_handler: RequestHandler) -> None:
    """GET /tokenizer_info. chat_template: its source, where there is one."""
    if not request_handler.description.has_tokenizer:
        raise InvalidRequest([Violation("model", "this model has no tokenizer")])
    special = _end_of_text(request_handler) or None
    info: dict[str, Any] = dict.fromkeys(("bos_token", "eos_token", "pad_token"), special)
    info |= {"tokenizer_class": "ppserve", "model_max_length": request_handler.description.max_context}
    await exchange.answer(_encode(info | {"chat_template": chat_template}))


def _model(request_handler: RequestHandler) -> dict[str, Any]:
    description = request_handler.description
    return {
        "id": description.name,
        "object": "model",
        "created": _STARTED_S,
        "owned_by": "ppserve",
        "max_model_len": description.max_context,
    }


def _end_of_text(request_handler: RequestHandler) -> str:
    eos_id = request_handler.description.eos_id
    return "" if eos_id is None else request_handler.token_bytes(eos_id).decode("utf-8", "replace")
