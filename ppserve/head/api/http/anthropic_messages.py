"""/v1/messages and /v1/messages/count_tokens: answers in Anthropic's form."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ppserve.core.request import FinishReason, Request
from ppserve.errors import InvalidRequest, RequestError
from ppserve.head.api.call import Call
from ppserve.head.api.http.answers import Json
from ppserve.head.api.http.anthropic_body import MessagesBody
from ppserve.head.api.http.blocks import AnswerBlock, BlockAnswers, BlockChange, BlockKind
from ppserve.head.api.http.bodies import read_body
from ppserve.head.api.http.conversation import read_arguments
from ppserve.head.api.http.responses import ErrorForm, JsonResponse, encode, event
from ppserve.head.api.request_handler import RequestHandler
from ppserve.head.api.requests import renamed
from ppserve.head.api.stream import Delta

_STOP_REASONS = {
    FinishReason.EOS: "end_turn",
    FinishReason.STOP_TOKEN: "end_turn",
    FinishReason.STOP_STRING: "stop_sequence",
    FinishReason.MAX_TOKENS: "max_tokens",
    FinishReason.CONTEXT_LENGTH: "model_context_window_exceeded",
    FinishReason.CANCELLED: "abort",
}
"""The words are Anthropic's, but for `abort`, the word of chats for an end before its time."""

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


_DELTAS: Mapping[BlockKind, tuple[str, str]] = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
"""The type of the deltas by which a block of each kind grows, and the field that has the new text."""


async def count_tokens(request: HttpRequest, handler: RequestHandler) -> Response:
    """POST /v1/messages/count_tokens."""
    body = await read_body(request, MessagesBody, handler)
    (chat,) = body.prompts
    try:
        ids, _ = await handler.chat_prompt(chat, request.state.call.caller)
    except InvalidRequest as error:
        raise renamed(error, body.names) from None
    return JsonResponse({"input_tokens": len(ids)})


class MessageAnswers(BlockAnswers):
    """The answer as Anthropic's message, whose content are its blocks."""

    def __init__(
        self, call: Call, body: MessagesBody, requests: Sequence[Request], handler: RequestHandler
    ) -> None:
        super().__init__(call, body, requests, handler)
        self._shows_reasoning = body.thinks

    def opening(self, first: Delta) -> Iterator[bytes]:
        nothing: Json = {"content": [], "stop_reason": None, "stop_sequence": None}
        usage = {**self._usage(first), "output_tokens": 0}
        yield _event("message_start", message={**self._head, **nothing, "usage": usage})
        yield _event("ping")

    def failing(self, error: RequestError) -> Iterator[bytes]:
        yield event(messages_error(error), "error")

    @property
    def _head(self) -> Json:
        return {"id": f"msg_{self._id}", "type": "message", "role": "assistant", **self._facts}

    def _whole(self, last: Delta) -> Json:
        content = [_content(block) for block in self._row.blocks]
        return {**self._head, "content": content, **_end(last), "usage": self._usage(last)}

    def _block_events(self, change: BlockChange) -> Iterator[bytes]:
        index = change.block.index
        match change.what:
            case "begins":
                yield _event("content_block_start", index=index, content_block=_content(change.block))
            case "grows":
                kind, field = _DELTAS[change.block.kind]
                yield _event("content_block_delta", index=index, delta={"type": kind, field: change.text})
            case "ends":
                if change.block.kind == "reasoning":
                    signed = {"type": "signature_delta", "signature": _signature(change.block.text)}
                    yield _event("content_block_delta", index=index, delta=signed)
                yield _event("content_block_stop", index=index)

    def _end_events(self, last: Delta) -> Iterator[bytes]:
        yield _event("message_delta", delta=_end(last), usage=self._usage(last))
        yield _event("message_stop")

    def _usage(self, delta: Delta) -> Json:
        cached = delta.last.cached_tokens
        return {
            "input_tokens": len(self._request.prompt_ids) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": delta.num_generated,
        }


def messages_error(error: RequestError) -> bytes:
    """Write an error in Anthropic's form."""
    status = error.http_status
    kind = _ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return encode({"type": "error", "error": {"type": kind, "message": str(error)}})


MESSAGES_ERRORS = ErrorForm(
    messages_error,
    "MessagesError",
    {
        "title": "MessagesError",
        "description": "An answer whose status is not 200. The message begins with the field that is wrong.",
        "type": "object",
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
                "required": ["type", "message"],
            },
        },
        "required": ["type", "error"],
    },
)


def _content(block: AnswerBlock) -> Json:
    match block.kind:
        case "text":
            return {"type": "text", "text": block.text}
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": _signature(block.text)}
        case "call":
            return {
                "type": "tool_use",
                "id": block.call_id,
                "name": block.name,
                "input": read_arguments(block.text),
            }


def _signature(thought: str) -> str:
    """Return what stands for Anthropic's signature, as clients give back no thought without one.

    It proves nothing, and is not read. A thought that has not begun has none.
    """
    return hashlib.sha256(thought.encode()).hexdigest() if thought else ""


def _end(delta: Delta) -> Json:
    reason, matched = delta.last.finish, delta.last.matched
    assert reason is not None, "the last delta has the end"
    stopped = matched if reason is FinishReason.STOP_STRING else None
    told = _STOP_REASONS[reason]
    return {
        "stop_reason": "tool_use" if delta.has_called and told == "end_turn" else told,
        "stop_sequence": stopped,
    }


def _event(name: str, /, **fields: Any) -> bytes:
    return event(encode({"type": name, **fields}), name)
