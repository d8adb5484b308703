"""/v1/chat/completions: the chat template makes one prompt of the messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import msgspec

from ppserve.core.request import Request
from ppserve.errors import Violation
from ppserve.head.api.asked_chat import AskedChat, ShownMessage
from ppserve.head.api.call import Call
from ppserve.head.api.http.answers import ChoiceAnswers, Json, PromptProgress
from ppserve.head.api.http.conversation import read_arguments
from ppserve.head.api.http.tools import ToolBody, message_of
from ppserve.head.api.http.unserved import OF_ALL, OF_CHATS, Neutral
from ppserve.head.api.request_handler import RequestHandler
from ppserve.head.api.stream import Delta

REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names that a message's reasoning may have. Templates read the first, or the second."""
# A template gets these from other fields than `chat_template_kwargs`.
_OTHER_FIELDS = {
    *("messages", "add_generation_prompt", "continue_final_message"),
    *("tools", "bos_token", "eos_token", "pad_token", "unk_token"),
}


class TextPart(msgspec.Struct):
    """A part of a message's content. Only texts are served; an assistant's refusal is one."""

    type: str
    text: str | None = None
    refusal: str | None = None


def _as_text(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "text", "text": part.get("refusal")} if part["type"] == "refusal" else part


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None

    @property
    def parsed(self) -> dict[str, Any]:
        return self.arguments if isinstance(self.arguments, dict) else read_arguments(self.arguments)


class ToolCall(msgspec.Struct):
    """A call that an earlier answer made."""

    function: CalledFunction


class ChatMessage(msgspec.Struct):
    role: str
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: CalledFunction | None = None
    audio: Any = None
    refusal: str | None = None
    given: Any = msgspec.field(default=None, name="")
    """The message as the caller gave it: templates show other fields too."""

    def violations(self, place: str) -> Iterator[Violation]:
        says = self.content is not None or self.refusal is not None
        if not says and not self.tool_calls and self.function_call is None:
            yield Violation(f"{place}.content", "missing")
        if self.audio:
            yield Violation(f"{place}.audio", "not served")
        for number, part in enumerate(self.content if isinstance(self.content, list) else ()):
            if part.type not in ("text", "refusal"):
                yield Violation(f"{place}.content[{number}]", "only text is served")

    def for_template(self) -> dict[str, Any]:
        """Return the message as transformers and vLLM give it to a template.

        A field or part that is null is absent, and the arguments of calls are objects.
        """
        message = {name: value for name, value in self.given.items() if value is not None}
        content = message.get("content") or message.get("refusal") or ""
        if isinstance(content, list):
            content = [part for part in map(_as_text, content) if part.get("text") is not None]
        message["content"] = content or ""
        if self.tool_calls:
            message["tool_calls"] = [
                call | {"function": call["function"] | {"arguments": read.function.parsed}}
                for call, read in zip(message["tool_calls"], self.tool_calls, strict=True)
            ]
        else:
            message.pop("tool_calls", None)
        if self.function_call is not None:  # OpenAI's older form
            called = message.pop("function_call") | {"arguments": self.function_call.parsed}
            message.setdefault("tool_calls", [{"type": "function", "function": called}])
        if (reasoning := next((message[name] for name in REASONING if name in message), None)) is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        return message


class ChatBody(ToolBody, kw_only=True):
    """The body of /v1/chat/completions."""

    unserved: ClassVar[Mapping[str, Neutral]] = {**OF_ALL, **OF_CHATS}

    messages: list[ChatMessage]
    has_logprobs: bool | None = msgspec.field(default=None, name="logprobs")
    logprobs: int | None = msgspec.field(default=None, name="top_logprobs")
    continue_final_message: bool | None = None  # whether the answer is the rest of the last message
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[Any] | None = None
    reasoning_effort: str | None = None

    @property
    def num_top(self) -> int | None:
        return (self.logprobs or 0) if self.has_logprobs else None

    @property
    def names(self) -> dict[str, str]:
        return {**super().names, "prompt": "messages", "output.logprobs": "top_logprobs"}

    def keep(self, given: dict[str, Any]) -> None:
        super().keep(given)
        for message, own in zip(self.messages, given["messages"], strict=True):
            message.given = own
        # It is made here because a long body is read in a thread.
        _ = self.prompts

    @cached_property
    def prompts(self) -> Sequence[AskedChat]:
        chat = AskedChat(
            messages=[
                ShownMessage(f"messages[{place}]", message.for_template())
                for place, message in enumerate(self.messages)
            ],
            variables=self.template_variables(),
            continues=bool(self.continue_final_message),
            tooling=self.tooling,
            form=self.form,
            surrounds=bool(self.add_special_tokens),
        )
        return [chat]

    def template_variables(self) -> dict[str, Any]:
        given = {
            "add_generation_prompt": self.add_generation_prompt,
            "documents": self.documents,
            "reasoning_effort": self.reasoning_effort or None,
        }
        named = {name: value for name, value in given.items() if value is not None}
        return {**(self.chat_template_kwargs or {}), **named}

    def violations(self) -> Iterator[Violation]:
        yield from super().violations()
        for place, message in enumerate(self.messages):
            yield from message.violations(f"messages[{place}]")
        if self.logprobs and not self.has_logprobs:
            yield Violation("top_logprobs", "only with logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            yield Violation("continue_final_message", "not together with add_generation_prompt")
        for name in sorted(_OTHER_FIELDS & (self.chat_template_kwargs or {}).keys()):
            yield Violation(f"chat_template_kwargs.{name}", "is given by another field")


class ChatAnswers(ChoiceAnswers):
    """The answers to one chat."""

    objects: ClassVar[tuple[str, str]] = ("chat.completion", "chat.completion.chunk")
    id_prefix: ClassVar[str] = "chatcmpl-"
    _is_first = True

    def __init__(self, call: Call, body: ChatBody, requests: Sequence[Request], handler: RequestHandler) -> None:
        super().__init__(call, body, requests, handler)
        self._has_functions = bool(body.functions)

    def opening(self, _first: Delta) -> Iterator[bytes]:
        """Yield an event for each sequence, in their order, which has its role and nothing else.

        OpenAI's stream helpers make a choice of its first event, and then add that event's log-probabilities to it
        once more. They also number choices as they come.
        """
        (prompt,) = self._prompts
        for index in prompt.request.indices:
            nothing = dict.fromkeys(("logprobs", "finish_reason", "stop_reason"))
            yield self._event(prompt, {"index": index, "delta": {"role": "assistant", "content": ""}, **nothing})

    def _choice(self, prompt: PromptProgress, delta: Delta, is_whole: bool) -> Json:
        has_scores = self._num_top is not None
        logprobs = prompt.writers[delta.index].chat(delta.tokens) if has_scores else None
        message = message_of(delta.parts, is_whole, self._has_functions)
        if is_whole:
            message = {"role": "assistant", **message}
        choice = {**prompt.choice(delta), "message" if is_whole else "delta": message, "logprobs": logprobs}
        if delta.has_called and choice["finish_reason"] == "stop":
            choice["finish_reason"] = "function_call" if self._has_functions else "tool_calls"
        return choice

    def _record(self, kind: str, choices: Sequence[Json], **more: Any) -> Json:
        """Make a record. As in vLLM, whole answers and a stream's first event have the prompt's tokens."""
        if self._is_first and self._prompts[0].has_ids:
            more["prompt_token_ids"] = self._prompts[0].request.prompt_ids
        if self._num_prompt_top is not None:
            more["prompt_logprobs"] = self._prompt_logprobs(self._prompts[0])
        self._is_first = False
        return super()._record(kind, choices, **more)
