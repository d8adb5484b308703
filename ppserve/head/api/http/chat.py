"""/v1/chat/completions: a template that the operator gives makes one prompt of the messages."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import msgspec
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import UNSET, UnsetType

from ppserve.errors import ConfigError, InvalidRequest, Violation
from ppserve.head.api.desk import FrontDesk
from ppserve.head.api.http.answers import Answers, PromptProgress, finish_of
from ppserve.head.api.http.exchange import Exchange
from ppserve.head.api.http.failures import HttpError
from ppserve.head.api.http.fields import Sampling, asked_from, check_model
from ppserve.head.api.http.generating import generate
from ppserve.head.api.http.logprobs import ChatLogprobsJson
from ppserve.head.api.stream import Delta

MAX_MESSAGES = 1024


class TextPart(msgspec.Struct, kw_only=True):
    """A part of a message's content. Only texts are served."""

    type: str
    text: str = ""


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None


class ChatBody(Sampling, kw_only=True):
    """Of /v1/chat/completions. max_completion_tokens: OpenAI's newer name of max_tokens."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    tools: list[Any] | None = None
    response_format: dict[str, Any] | None = None


class MessageJson(msgspec.Struct):
    """An answer's message, or what is new of it. role: on the first event only, and on whole answers."""

    content: str
    role: str | UnsetType = UNSET


class ChatChoiceJson(msgspec.Struct, kw_only=True):
    """One answer, with `message`, or what is new of it, with `delta`."""

    index: int
    message: MessageJson | UnsetType = UNSET
    delta: MessageJson | UnsetType = UNSET
    logprobs: ChatLogprobsJson | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class ChatAnswers(Answers):
    """Makes the answers to one chat."""

    objects: ClassVar[tuple[str, str]] = ("chat.completion", "chat.completion.chunk")
    id_prefix: ClassVar[str] = "chatcmpl-"

    def _choice(self, prompt: PromptProgress, delta: Delta, is_whole: bool) -> ChatChoiceJson:
        prompt.note(delta)
        said = MessageJson(delta.text, "assistant" if delta.is_first else UNSET)
        return ChatChoiceJson(
            index=prompt.choice_index(delta),
            message=said if is_whole else UNSET,
            delta=UNSET if is_whole else said,
            logprobs=prompt.writer(delta.index).chat(delta.tokens) if prompt.has_scores else None,
            token_ids=prompt.ids(delta),
            prompt_token_ids=prompt.prompt_ids(delta),
            **finish_of(delta),
        )


class ChatTemplate:
    """A Jinja template as Hugging Face's tokenizers have them, in Jinja's sandbox."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file that is no template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = lambda value, **more: json.dumps(value, ensure_ascii=False, **more)
        try:
            self.source = path.read_text("utf-8")
            self._template = environment.from_string(self.source)
        except OSError as error:
            raise ConfigError("--chat-template", f"cannot read {path}: {error.strerror}") from error
        except (UnicodeDecodeError, TemplateError) as error:
            raise ConfigError("--chat-template", f"{path} is not a Jinja template: {error}") from error

    def render(self, body: ChatBody, end_of_text: str) -> str:
        """The messages as one text. end_of_text: what the template's `eos_token` and `bos_token` stand for. Raises
        InvalidRequest for messages that the template does not take."""
        opens = body.add_generation_prompt is not False
        try:
            return self._template.render(
                messages=[_shown(message) for message in body.messages],
                add_generation_prompt=opens,
                eos_token=end_of_text,
                bos_token=end_of_text,
            )
        except Exception as error:
            # A template may fail in any way on messages that its author did not think of.
            why = str(error) if isinstance(error, TemplateError) else type(error).__name__
            raise InvalidRequest([Violation("messages", f"the chat template refuses them: {why}")]) from error


class Chats:
    """Serves the path. template: None where the operator gave none."""

    def __init__(self, template: ChatTemplate | None) -> None:
        self._template = template

    async def answer(self, exchange: Exchange, desk: FrontDesk) -> None:
        """POST /v1/chat/completions."""
        body = await exchange.read(_chat_body)
        check_model(body.model, desk.card.name)
        if self._template is None:
            problem = "this model has no chat template, and the server was given none: see --chat-template"
            raise HttpError(400, "NO_CHAT_TEMPLATE", problem)
        _check(body)
        prompt = await self._prompt(self._template, body, desk)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        more: dict[str, Any] = {"logprobs": logprobs}
        if body.max_completion_tokens is not None:
            more["max_tokens"] = body.max_completion_tokens
        await generate(exchange, desk, body, [asked_from(body, prompt, **more)], ChatAnswers)

    @staticmethod
    async def _prompt(template: ChatTemplate, body: ChatBody, desk: FrontDesk) -> list[int]:
        """Where the template says end-of-text that token stands; where a message says so it is only text."""
        mark = secrets.token_hex(16)
        text = await asyncio.to_thread(template.render, body, mark)
        ids: list[int] = []
        for place, part in enumerate(text.split(mark)):
            ids += [desk.card.eos_id] if place and desk.card.eos_id is not None else []
            ids += await desk.tokenize("messages", part)
        return ids


_chat_body = msgspec.json.Decoder(ChatBody)


def _check(body: ChatBody) -> None:
    wrong = []
    if not 1 <= len(body.messages) <= MAX_MESSAGES:
        wrong.append(Violation("messages", f"{len(body.messages)} messages; 1 to {MAX_MESSAGES} are allowed"))
    for place, message in enumerate(body.messages):
        if isinstance(message.content, list) and any(part.type != "text" for part in message.content):
            wrong.append(Violation(f"messages[{place}].content", "only text is served"))
            break
    if body.top_logprobs is not None and not body.logprobs:
        wrong.append(Violation("top_logprobs", "only with logprobs"))
    if body.tools:
        wrong.append(Violation("tools", "not served"))
    if body.response_format is not None and body.response_format.get("type") != "text":
        wrong.append(Violation("response_format", "not served, other than text"))
    if wrong:
        raise InvalidRequest(wrong)


def _shown(message: ChatMessage) -> Mapping[str, str]:
    content = message.content or ""
    if not isinstance(content, str):
        content = "".join(part.text for part in content)
    named = {} if message.name is None else {"name": message.name}
    return {"role": message.role, "content": content, **named}


def _refuse(message: str) -> NoReturn:
    """`raise_exception` of Hugging Face's templates."""
    raise TemplateError(message)
