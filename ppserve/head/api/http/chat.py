"""/v1/chat/completions: a template that the operator gives makes one prompt of the messages."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import msgspec
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import UNSET, UnsetType

from ppserve.errors import ConfigError, InvalidRequest, Violation
from ppserve.head.api.http.answers import AnswerJson, Answers, PromptProgress, UsageJson, finish_of
from ppserve.head.api.http.exchange import Exchange
from ppserve.head.api.http.failures import HttpError
from ppserve.head.api.http.fields import Sampling, Unserved, asked_from, called, check_model, check_served
from ppserve.head.api.http.generating import generate
from ppserve.head.api.http.logprobs import ChatLogprobsJson
from ppserve.head.api.request_handler import RequestHandler
from ppserve.head.api.stream import Delta

MAX_MESSAGES = 1024
# What templates are given by other fields than `chat_template_kwargs`.
_OTHER_FIELDS = {"messages", "add_generation_prompt", "continue_final_message", "eos_token", "bos_token"}


class TextPart(msgspec.Struct, kw_only=True):
    """A part of a message's content. Only texts are served."""

    type: str
    text: str = ""


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None

    tool_calls: Unserved = None
    function_call: Unserved = None
    audio: Unserved = None


class ChatBody(Sampling, kw_only=True):
    """Of /v1/chat/completions. max_completion_tokens: OpenAI's newer name of max_tokens. chat_template_kwargs,
    documents, reasoning_effort: for the template. continue_final_message: the answer is the rest of it."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[Any] | None = None
    reasoning_effort: str | None = None

    audio: Unserved = None
    chat_template: Unserved = None
    echo: Unserved = None
    function_call: Unserved = None
    functions: Unserved = None
    modalities: Unserved = None
    tool_choice: Unserved = None
    tools: Unserved = None
    web_search_options: Unserved = None


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


class ChatAnswers(Answers):
    """Makes the answers to one chat."""

    objects: ClassVar[tuple[str, str]] = ("chat.completion", "chat.completion.chunk")
    id_prefix: ClassVar[str] = "chatcmpl-"
    _is_first = True

    def _choice(self, prompt: PromptProgress, delta: Delta, is_whole: bool) -> ChatChoiceJson:
        prompt.note(delta)
        said = MessageJson(delta.text, "assistant" if delta.is_first else UNSET)
        return ChatChoiceJson(
            index=prompt.choice_index(delta),
            message=said if is_whole else UNSET,
            delta=UNSET if is_whole else said,
            logprobs=prompt.writer(delta.index).chat(delta.tokens) if prompt.has_scores else None,
            token_ids=prompt.ids(delta),
            **finish_of(delta),
        )

    def _record(self, kind: str, choices: Sequence[Any], usage: UsageJson | UnsetType | None) -> AnswerJson:
        """As vLLM has it: the prompt's tokens are on whole answers, and on a stream's first event."""
        record = super()._record(kind, choices, usage)
        if self._is_first:
            record.prompt_token_ids = self._prompts[0].all_prompt_ids
        self._is_first = False
        return record


class GenerationBlock(Extension):
    """`{% generation %}`: transformers marks with it what a model is trained to say. Here it is its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatTemplate:
    """A Jinja template as Hugging Face's tokenizers have them, in Jinja's sandbox. It may name the day
    (`strftime_now`): then the same messages are another prompt tomorrow."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file that is no template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationBlock]
        )
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        environment.filters["tojson"] = lambda value, **more: json.dumps(value, **{"ensure_ascii": False, **more})
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
        continues = bool(body.continue_final_message)
        opens = not continues if body.add_generation_prompt is None else body.add_generation_prompt
        messages = [_shown(message) for message in body.messages]
        # With a space, as transformers has it: a template that strips messages shows itself.
        mark = secrets.token_hex(16) + " "
        if continues:
            messages[-1]["content"] += mark
        more = {"documents": body.documents, "reasoning_effort": body.reasoning_effort}
        given = {
            **(body.chat_template_kwargs or {}),
            **{name: value for name, value in more.items() if value is not None},
            "messages": messages,
            "add_generation_prompt": opens,
            **dict.fromkeys(("eos_token", "bos_token"), end_of_text),
        }
        try:
            text = self._template.render(given)
        except Exception as error:
            # A template may fail in any way on messages that its author did not think of.
            why = str(error) if isinstance(error, TemplateError) else type(error).__name__
            raise InvalidRequest([Violation("messages", f"the chat template refuses them: {why}")]) from error
        return _until(mark, text) if continues else text


_chat_body = msgspec.json.Decoder(ChatBody)


async def chat_completions(
    template: ChatTemplate | None, exchange: Exchange, request_handler: RequestHandler
) -> None:
    """POST /v1/chat/completions. template: None where the operator gave none."""
    body = await exchange.read(_chat_body)
    check_model(body.model, request_handler.description.name)
    if template is None:
        problem = "this model has no chat template, and the server was given none: see --chat-template"
        raise HttpError(400, "NO_CHAT_TEMPLATE", problem)
    _check(body)
    prompt = await _prompt(template, body, request_handler)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    more: dict[str, Any] = {"logprobs": logprobs}
    names = {"prompt": "messages", "output.logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        more["max_tokens"] = body.max_completion_tokens
        names["stop.max_tokens"] = "max_completion_tokens"
    try:
        await generate(exchange, request_handler, body, [asked_from(body, prompt, **more)], ChatAnswers)
    except InvalidRequest as error:
        raise called(names, error) from None


async def _prompt(template: ChatTemplate, body: ChatBody, request_handler: RequestHandler) -> list[int]:
    """Where the template says end-of-text that token stands; where a message says so it is only text."""
    mark = secrets.token_hex(16)
    text = await asyncio.to_thread(template.render, body, mark)
    return await request_handler.tokenize("messages", *text.split(mark))


def _check(body: ChatBody) -> None:
    wrong = []
    if not 1 <= len(body.messages) <= MAX_MESSAGES:
        wrong.append(Violation("messages", f"{len(body.messages)} messages; 1 to {MAX_MESSAGES} are allowed"))
    for place, message in enumerate(body.messages):
        if isinstance(message.content, list) and any(part.type != "text" for part in message.content):
            wrong.append(Violation(f"messages[{place}].content", "only text is served"))
            break
    if body.top_logprobs and not body.logprobs:
        wrong.append(Violation("top_logprobs", "only with logprobs"))
    if body.continue_final_message and body.add_generation_prompt:
        wrong.append(Violation("continue_final_message", "not together with add_generation_prompt"))
    if taken := sorted(_OTHER_FIELDS & (body.chat_template_kwargs or {}).keys()):
        wrong.append(Violation(f"chat_template_kwargs.{taken[0]}", "is given by another field"))
    if wrong:
        raise InvalidRequest(wrong)
    places = ((f"messages[{place}].", message) for place, message in enumerate(body.messages))
    check_served(("", body), *places)


def _until(mark: str, text: str) -> str:
    """What stands before the last message's end. Raises InvalidRequest for a template that does not show it."""
    before, found, after = text.rpartition(mark.rstrip())
    if not found:
        raise InvalidRequest([Violation("continue_final_message", "the chat template does not show that message")])
    return before if after.startswith(" ") else before.rstrip()


def _shown(message: ChatMessage) -> dict[str, str]:
    content = message.content or ""
    if not isinstance(content, str):
        content = "".join(part.text for part in content)
    named = {} if message.name is None else {"name": message.name}
    return {"role": message.role, "content": content, **named}


def _refuse(message: str) -> NoReturn:
    """`raise_exception` of Hugging Face's templates."""
    raise TemplateError(message)
