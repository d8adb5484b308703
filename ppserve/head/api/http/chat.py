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
from starlette.requests import Request
from starlette.responses import Response

from ppserve.errors import ConfigError, InvalidRequest, Violation
from ppserve.head.api.http.answers import Answers, Json, PromptProgress
from ppserve.head.api.http.calls import read_body
from ppserve.head.api.http.failures import HTTP_NAMES, HttpError
from ppserve.head.api.http.fields import (
    SAMPLING,
    Body,
    Field,
    Table,
    Unserved,
    check_common,
    parse_fields,
    request_fields,
)
from ppserve.head.api.http.generating import generate
from ppserve.head.api.request_handler import RequestHandler
from ppserve.head.api.requests import refuse
from ppserve.head.api.stream import Delta

MAX_MESSAGES = 1024
# What templates are given by other fields than `chat_template_kwargs`.
_OTHER_FIELDS = {"messages", "add_generation_prompt", "continue_final_message", "eos_token", "bos_token"}


class TextPart(msgspec.Struct, kw_only=True):
    """A part of a message's content. Only texts are served."""

    type: str
    text: str = ""


MESSAGE: Table = {
    "role": Field(str, is_needed=True),
    "content": Field(str | list[TextPart]),
    "name": Field(str),
    **dict.fromkeys(("tool_calls", "function_call", "audio"), Unserved()),
}

CHAT: Table = {
    **SAMPLING,
    "messages": Field(list[dict[str, Any]], is_needed=True),
    # OpenAI's newer name of max_tokens.
    "max_completion_tokens": Field(int, "max_tokens"),
    "logprobs": Field(bool),
    "top_logprobs": Field(int),
    # The answer is the rest of the last message.
    "continue_final_message": Field(bool),
    # For the template.
    "add_generation_prompt": Field(bool),
    "chat_template_kwargs": Field(dict[str, Any]),
    "documents": Field(list[Any]),
    "reasoning_effort": Field(str),
    **dict.fromkeys(("audio", "chat_template", "echo", "functions", "tools", "web_search_options"), Unserved()),
    "function_call": Unserved("none"),
    "modalities": Unserved(["text"]),
    "tool_choice": Unserved("none"),
}


class ChatAnswers(Answers):
    """Makes the answers to one chat."""

    objects: ClassVar[tuple[str, str]] = ("chat.completion", "chat.completion.chunk")
    id_prefix: ClassVar[str] = "chatcmpl-"
    _is_first = True

    def _choice(self, prompt: PromptProgress, delta: Delta, is_whole: bool) -> Json:
        role = {"role": "assistant"} if delta.is_first else {}
        logprobs = prompt.writers[delta.index].chat(delta.tokens) if prompt.has_scores else None
        message = {**role, "content": delta.text}
        return {**prompt.choice(delta), "message" if is_whole else "delta": message, "logprobs": logprobs}

    def _record(self, kind: str, choices: Sequence[Json], **more: Any) -> Json:
        """As vLLM has it: the prompt's tokens are on whole answers, and on a stream's first event."""
        if self._is_first and self._prompts[0].has_ids:
            more["prompt_token_ids"] = self._prompts[0].request.prompt_ids
        self._is_first = False
        return super()._record(kind, choices, **more)


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

    def render(self, body: Body, messages: Sequence[Body], end_of_text: str) -> str:
        """The messages as one text. end_of_text: what the template's `eos_token` and `bos_token` stand for. Raises
        InvalidRequest for messages that the template does not take."""
        continues = body.get("continue_final_message", False)
        shown = [_shown(message) for message in messages]
        # With a space, as transformers has it: a template that strips messages shows itself.
        mark = secrets.token_hex(16) + " "
        if continues:
            shown[-1]["content"] += mark
        given = {
            **body.get("chat_template_kwargs", {}),
            **{name: body[name] for name in ("documents", "reasoning_effort") if name in body},
            "messages": shown,
            "add_generation_prompt": body.get("add_generation_prompt", not continues),
            **dict.fromkeys(("eos_token", "bos_token"), end_of_text),
        }
        try:
            text = self._template.render(given)
        except Exception as error:
            # A template may fail in any way on messages that its author did not think of.
            why = str(error) if isinstance(error, TemplateError) else type(error).__name__
            raise InvalidRequest([Violation("messages", f"the chat template refuses them: {why}")]) from error
        return _until(mark, text) if continues else text


async def chat_completions(template: ChatTemplate | None, request: Request, handler: RequestHandler) -> Response:
    """POST /v1/chat/completions. template: None where the operator gave none."""
    with handler.counting_refusals():
        body = await read_body(request, CHAT)
        check_common(body, handler.description.name)
        if template is None:
            problem = "this model has no chat template, and the server was given none: see --chat-template"
            raise HttpError(400, "NO_CHAT_TEMPLATE", problem)
        messages = _messages_from(body)
        # Where the template says end-of-text that token stands; where a message says so it is only text.
        mark = secrets.token_hex(16)
        text = await asyncio.to_thread(template.render, body, messages, mark)
        prompt = await handler.tokenize("messages", *text.split(mark))
        given = request_fields(body, CHAT)
    if body.get("logprobs"):
        given["logprobs"] = body.get("top_logprobs", 0)
    names = {**HTTP_NAMES, "prompt": "messages", "output.logprobs": "top_logprobs"}
    if "max_completion_tokens" in body:
        names["stop.max_tokens"] = "max_completion_tokens"
    return await generate(request, handler, body, given, [prompt], ChatAnswers, names)


def _messages_from(body: Body) -> list[Body]:
    """Raises InvalidRequest."""
    given = body["messages"]
    if not 1 <= len(given) <= MAX_MESSAGES:
        raise InvalidRequest([Violation("messages", f"{len(given)} messages; 1 to {MAX_MESSAGES} are allowed")])
    messages = [parse_fields(message, MESSAGE, f"messages[{place}].") for place, message in enumerate(given)]
    wrong = []
    for place, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list) and any(part.type != "text" for part in content):
            wrong.append(Violation(f"messages[{place}].content", "only text is served"))
    if body.get("top_logprobs") and not body.get("logprobs"):
        wrong.append(Violation("top_logprobs", "only with logprobs"))
    if body.get("continue_final_message") and body.get("add_generation_prompt"):
        wrong.append(Violation("continue_final_message", "not together with add_generation_prompt"))
    if taken := sorted(_OTHER_FIELDS & body.get("chat_template_kwargs", {}).keys()):
        wrong.append(Violation(f"chat_template_kwargs.{taken[0]}", "is given by another field"))
    refuse(wrong)
    return messages


def _until(mark: str, text: str) -> str:
    """What stands before the last message's end. Raises InvalidRequest for a template that does not show it."""
    before, found, after = text.rpartition(mark.rstrip())
    if not found:
        raise InvalidRequest([Violation("continue_final_message", "the chat template does not show that message")])
    return before if after.startswith(" ") else before.rstrip()


def _shown(message: Body) -> dict[str, str]:
    content = message.get("content", "")
    if not isinstance(content, str):
        content = "".join(part.text for part in content)
    return {**message, "content": content}


def _refuse(message: str) -> NoReturn:
    """`raise_exception` of Hugging Face's templates."""
    raise TemplateError(message)
