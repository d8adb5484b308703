"""/v1/responses: OpenAI's newer form of chats. No answer is kept: every request has the whole conversation."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import count
from typing import Any, ClassVar

import msgspec

from ppserve.core.request import FinishReason, Request
from ppserve.errors import RequestError, Violation
from ppserve.head.api.answer_parts.tools import ToolChoice, Tooling
from ppserve.head.api.asked_chat import AskedChat
from ppserve.head.api.call import Call
from ppserve.head.api.http.answers import Json
from ppserve.head.api.http.blocks import AnswerBlock, BlockAnswers, BlockChange, BlockKind
from ppserve.head.api.http.bodies import GenerationBody
from ppserve.head.api.http.conversation import (
    Turn,
    call_of,
    lacking,
    read_arguments,
    reasoning_variables,
    to_messages,
)
from ppserve.head.api.http.forms import AskedForm, TextFormat, of_text_format
from ppserve.head.api.http.response_tools import (
    NAMESPACE,
    ResponseTool,
    ResponseToolChoice,
    choice_of,
    full_name,
    functions_of,
    ignored_tools,
    tool_of,
)
from ppserve.head.api.http.responses import encode, event
from ppserve.head.api.http.tools import ALLOWED, CHOICES, FUNCTION
from ppserve.head.api.http.unserved import OF_ALL, OF_NEWER, OF_RESPONSES, Neutral
from ppserve.head.api.request_handler import RequestHandler
from ppserve.head.api.stream import Delta
from ppserve.head.options import GenerationOptions

_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_NEEDS: Mapping[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
"""The fields that an item of this type has. Other types are not served."""
_PACKED = "ppserve:"
_ENCRYPTED = "reasoning.encrypted_content"
_LOGPROBS = "message.output_text.logprobs"
_ECHOED: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
"""The fields that an answer repeats, and what it says if they are absent."""
_CONSTANT = {"background": False, "previous_response_id": None, "store": False}


_DELTAS: Mapping[BlockKind, str] = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}
"""The first part of the names of the events by which a block of each kind grows."""


class ContentPart(msgspec.Struct):
    """A part of a content. Only texts are served; a refusal is one."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @property
    def said(self) -> str | None:
        """The part's text; None if it has none, or is of another type."""
        return self.refusal if self.type == "refusal" else self.text if self.type in _TEXTS else None


Content = str | list[ContentPart]


class Item(msgspec.Struct):
    """One item of the input, with the fields of all types that are served."""

    type: str = "message"
    role: str | None = None
    content: Content | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None
    summary: list[ContentPart] | None = None
    namespace: str | None = None
    encrypted_content: str | None = None

    def violations(self, place: str) -> Iterator[Violation]:
        yield from lacking(place, self, _NEEDS)
        for name in ("content", "output", "summary"):
            given = getattr(self, name)
            for number, part in enumerate(given if isinstance(given, list) else ()):
                if part.said is None:
                    yield Violation(f"{place}.{name}[{number}]", "only text is served")

    def turn(self, place: str) -> Turn:
        """Return the item as a turn of a conversation. A developer's word is the system's."""
        match self.type:
            case "function_call":
                name = full_name(self.name or "", self.namespace)
                call = call_of(self.call_id or "", name, read_arguments(self.arguments))
                return Turn(field=place, role="assistant", calls=[call])
            case "function_call_output":
                return Turn(field=place, role="tool", texts=_texts(self.output), result_of=self.call_id)
            case "reasoning":
                thought = _texts(self.content) or _unpacked(self.encrypted_content) or _texts(self.summary)
                return Turn(field=place, role="assistant", reasoning=thought)
        role = "system" if self.role == "developer" else self.role or ""
        return Turn(field=place, role=role, texts=_texts(self.content))


def _packed(thought: str) -> str:
    """Return a thought as the encrypted content that clients give back. It is no secret: they were told the
    thought."""
    return _PACKED + base64.b64encode(thought.encode()).decode()


def _unpacked(packed: str | None) -> list[str]:
    """Return the thought in a list; an empty list if another server has encrypted it."""
    if packed is None or not packed.startswith(_PACKED):
        return []
    try:
        return [base64.b64decode(packed.removeprefix(_PACKED), validate=True).decode()]
    except ValueError:
        return []


class ReasoningEffort(msgspec.Struct):
    effort: str | None = None


class TextConfig(msgspec.Struct):
    format: TextFormat | None = None


class ResponsesBody(GenerationBody, kw_only=True):
    """The body of /v1/responses."""

    unserved: ClassVar[Mapping[str, Neutral]] = {**OF_ALL, **OF_NEWER, **OF_RESPONSES}

    input: str | list[Item]
    instructions: str | None = None
    max_tokens: int | None = msgspec.field(default=None, name="max_output_tokens")
    reasoning: ReasoningEffort | None = None
    text: TextConfig | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: str | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    store: bool | None = None
    """Whatever it says, nothing is stored, and every answer says so."""
    echoed: Any = msgspec.field(default=None, name="")

    def violations(self) -> Iterator[Violation]:
        yield from super().violations()
        for place, item in enumerate(self.input if isinstance(self.input, list) else ()):
            yield from item.violations(f"input[{place}]")
        if _LOGPROBS in (self.include or ()):
            yield Violation("include", f"{_LOGPROBS} is not served")
        for place, tool in enumerate(self.tools or ()):
            yield from tool.violations(f"tools[{place}]")
        if choice_of(self.tool_choice) is None:
            yield Violation("tool_choice", f"not one of {', '.join(CHOICES)}, nor a {FUNCTION}, nor {ALLOWED}")
        yield from self.tooling.violations()

    @property
    def effort(self) -> str | None:
        """How long the model should think; an empty word says nothing."""
        return (self.reasoning.effort or None) if self.reasoning is not None else None

    @cached_property
    def tooling(self) -> Tooling:
        """What the body says about tools. Those that OpenAI runs are left out: agents send them by default."""
        return Tooling(
            tools=tuple(tool_of(*function) for function in functions_of(self.tools or ())),
            choice=choice_of(self.tool_choice) or ToolChoice(),
            parallel=self.parallel_tool_calls is not False,
        )

    @classmethod
    def ignored(cls, given: Mapping[str, Any]) -> Iterator[str]:
        yield from super().ignored(given)
        yield from ignored_tools(given.get("tools"))

    def own_forms(self) -> Iterator[AskedForm]:
        return of_text_format("text.format", None if self.text is None else self.text.format)

    def keep(self, given: dict[str, Any]) -> None:
        super().keep(given)
        self.echoed = {name: value for name, value in given.items() if name in _ECHOED and value is not None}
        if "reasoning" in self.echoed:
            self.echoed["reasoning"] = {**self.echoed["reasoning"], "effort": self.effort}
        if self.tools:
            self.echoed["tools"] = [tool for tool in given["tools"] if tool["type"] in (FUNCTION, NAMESPACE)]
        _ = self.prompts

    @cached_property
    def prompts(self) -> Sequence[AskedChat]:
        items = [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        turns = [Turn(field="instructions", role="system", texts=[self.instructions])] if self.instructions else []
        turns += (item.turn(f"input[{place}]") for place, item in enumerate(items))
        effort = self.effort
        variables = reasoning_variables(None if effort is None else effort != "none", effort)
        chat = AskedChat(
            messages=to_messages(turns), variables=variables, tooling=self.tooling, form=self.form, place="input"
        )
        return [chat]

    def options(self) -> GenerationOptions:
        return replace(super().options(), max_tokens=self.max_tokens)

    @property
    def names(self) -> dict[str, str]:
        names = {"prompt": "input", "messages": "input", "stop.max_tokens": "max_output_tokens"}
        return {**super().names, **names}


def _texts(content: Content | None) -> list[str]:
    return [content] if isinstance(content, str) else [part.said or "" for part in content or ()]


class ResponseAnswers(BlockAnswers):
    """The answer as OpenAI's response, whose output are its blocks as items."""

    def __init__(
        self, call: Call, body: ResponsesBody, requests: Sequence[Request], handler: RequestHandler
    ) -> None:
        super().__init__(call, body, requests, handler)
        self._numbers = count()
        self._packs = _ENCRYPTED in (body.include or ())
        functions = functions_of(body.tools or ())
        self._spaces = {tool_of(space, each).name: (space, each.name) for space, each in functions}
        named = {"id": f"resp_{call.request_id}", "object": "response", "created_at": int(time.time())}
        self._head = {**named, **_ECHOED, **body.echoed, **_CONSTANT, **self._facts}

    def opening(self, _first: Delta) -> Iterator[bytes]:
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=self._record("in_progress"))

    def failing(self, error: RequestError) -> Iterator[bytes]:
        told = {"code": "server_error", "message": str(error)}
        yield self._event("response.failed", response=self._record("failed", error=told))

    def _end_events(self, last: Delta) -> Iterator[bytes]:
        ended = self._whole(last)
        name = "completed" if ended["status"] == "completed" else "incomplete"
        yield self._event(f"response.{name}", response=ended)

    def _whole(self, last: Delta) -> Json:
        if not self._is_cut:
            return self._record("completed")
        if last.last.finish is FinishReason.CANCELLED:
            return self._record("cancelled")
        return self._record("incomplete", incomplete_details={"reason": "max_output_tokens"})

    def _record(self, status: str, **more: Any) -> Json:
        has_ended = status != "in_progress"
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": [self._item(block) for block in self._row.blocks] if has_ended else [],
            "usage": self._usage() if has_ended and self._newest is not None else None,
            **more,
        }

    def _usage(self) -> Json:
        assert self._newest is not None
        num_prompt, num_generated = len(self._request.prompt_ids), self._newest.num_generated
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": self._newest.last.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": num_generated,
            "output_tokens_details": {"reasoning_tokens": self._newest.num_reasoning},
            "total_tokens": num_prompt + num_generated,
        }

    def _item(self, block: AnswerBlock, has_begun: bool = False) -> Json:
        """Return a block as an item of the output. has_begun: whether to return it as it was when it began."""
        status = "in_progress" if has_begun else "completed" if block.is_whole else "incomplete"
        item: Json = {"id": self._item_id(block), "status": status}
        content = [] if has_begun else [_part(block)]
        match block.kind:
            case "text":
                return {**item, "type": "message", "role": "assistant", "content": content}
            case "reasoning":
                packed = {"encrypted_content": _packed(block.text)} if self._packs and not has_begun else {}
                return {**item, "type": "reasoning", "summary": [], "content": content, **packed}
            case "call":
                return {**item, "type": "function_call", **self._called(block), "arguments": block.text}

    def _called(self, block: AnswerBlock) -> Json:
        namespace, name = self._spaces.get(block.name, (None, block.name))
        space = {} if name == block.name else {"namespace": namespace}
        return {"call_id": block.call_id, "name": name, **space}

    def _item_id(self, block: AnswerBlock) -> str:
        prefix = {"text": "msg", "reasoning": "rs", "call": "fc"}[block.kind]
        return f"{prefix}_{self._id}_{block.index}"

    def _block_events(self, change: BlockChange) -> Iterator[bytes]:
        block = change.block
        place: Json = {"item_id": self._item_id(block), "output_index": block.index}
        if block.kind != "call":
            place["content_index"] = 0
        logprobs: Json = {"logprobs": []} if block.kind == "text" else {}
        name = _DELTAS[block.kind]
        match change.what:
            case "begins":
                item = self._item(block, has_begun=True)
                yield self._event("response.output_item.added", output_index=block.index, item=item)
                if block.kind != "call":
                    yield self._event("response.content_part.added", **place, part=_part(block))
            case "grows":
                yield self._event(f"{name}.delta", **place, delta=change.text, **logprobs)
            case "ends":
                if block.kind == "call":
                    told = self._called(block)["name"]
                    yield self._event(f"{name}.done", **place, name=told, arguments=block.text)
                else:
                    yield self._event(f"{name}.done", **place, text=block.text, **logprobs)
                    yield self._event("response.content_part.done", **place, part=_part(block))
                item = self._item(block)
                yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        return event(encode({"type": name, "sequence_number": next(self._numbers), **fields}), name)


def _part(block: AnswerBlock) -> Json:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
