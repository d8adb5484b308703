"""The paths that describe the model, and turn text into tokens and back."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from ppserve.errors import InvalidRequest, Violation
from ppserve.head.api.desk import FrontDesk, aside
from ppserve.head.api.http.exchange import Exchange
from ppserve.head.api.http.fields import check_model
from ppserve.head.api.http.logprobs import token_name
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


async def models(exchange: Exchange, desk: FrontDesk) -> None:
    """GET /v1/models."""
    await exchange.answer(_encode({"object": "list", "data": [_model(desk)]}))


async def model(exchange: Exchange, desk: FrontDesk) -> None:
    """GET /v1/models/NAME."""
    check_model(exchange.path_parameter("name"), desk.card.name)
    await exchange.answer(_encode(_model(desk)))


async def version(exchange: Exchange, desk: FrontDesk) -> None:
    """GET /version."""
    card = desk.card
    await exchange.answer(_encode({"version": card.version, "system_fingerprint": card.fingerprint}))


async def tokenize(exchange: Exchange, desk: FrontDesk) -> None:
    """POST /tokenize. Other than in a prompt, the text of the end-of-text token is that token: this is how
    evaluation harnesses ask for its number."""
    body = await exchange.read(_tokenize_body)
    check_model(body.model, desk.card.name)
    check_text("prompt", body.prompt, desk.card)
    special = _end_of_text(desk)
    ids = await desk.tokenize("prompt", *(body.prompt.split(special) if special else [body.prompt]))
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": desk.card.max_context, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = await aside(len(ids), lambda: [token_name(desk.token_bytes(i)) for i in ids])
    await exchange.answer(_encode(answer))


async def detokenize(exchange: Exchange, desk: FrontDesk) -> None:
    """POST /detokenize. Special tokens show their text."""
    body = await exchange.read(_detokenize_body)
    check_model(body.model, desk.card.name)
    _, content = await desk.detokenize("tokens", body.tokens)
    await exchange.answer(_encode({"prompt": content.decode("utf-8", "replace")}))


async def tokenizer_info(chat_template: str | None, exchange: Exchange, desk: FrontDesk) -> None:
    """GET /tokenizer_info. chat_template: its source, where there is one."""
    if not desk.card.has_tokenizer:
        raise InvalidRequest([Violation("model", "this model has no tokenizer")])
    special = _end_of_text(desk) or None
    info: dict[str, Any] = dict.fromkeys(("bos_token", "eos_token", "pad_token"), special)
    info |= {"tokenizer_class": "ppserve", "model_max_length": desk.card.max_context}
    await exchange.answer(_encode(info | {"chat_template": chat_template}))


def _model(desk: FrontDesk) -> dict[str, Any]:
    card = desk.card
    return {
        "id": card.name,
        "object": "model",
        "created": _STARTED_S,
        "owned_by": "ppserve",
        "max_model_len": card.max_context,
    }


def _end_of_text(desk: FrontDesk) -> str:
    eos_id = desk.card.eos_id
    return "" if eos_id is None else desk.token_bytes(eos_id).decode("utf-8", "replace")
