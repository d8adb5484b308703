"""Chat templates as Hugging Face's tokenizers have them: they make one text of a chat's messages."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ppserve.errors import ConfigError, InvalidRequest, Violation


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

    def render(
        self, messages: Sequence[Mapping[str, str]], variables: Mapping[str, Any], eos_token: str, continues: bool
    ) -> str:
        """All messages as one text. eos_token: also the template's `bos_token`. continues: it ends inside the
        last message. Raises InvalidRequest for messages that the template does not take."""
        shown = [dict(message) for message in messages]
        # With a space, as transformers has it: a template that strips messages shows itself.
        mark = secrets.token_hex(16) + " "
        if continues:
            shown[-1]["content"] += mark
        try:
            text = self._template.render(variables, messages=shown, eos_token=eos_token, bos_token=eos_token)
        except Exception as error:
            # A template may fail in any way on messages that its author did not think of.
            why = str(error) if isinstance(error, TemplateError) else type(error).__name__
            raise InvalidRequest([Violation("messages", f"the chat template refuses them: {why}")]) from error
        return _until(mark, text) if continues else text


def _until(mark: str, text: str) -> str:
    """What stands before the last message's end. Raises InvalidRequest for a template that does not show it."""
    before, found, after = text.rpartition(mark.rstrip())
    if not found:
        raise InvalidRequest([Violation("continue_final_message", "the chat template does not show that message")])
    return before if after.startswith(" ") else before.rstrip()


def _refuse(message: str) -> NoReturn:
    """`raise_exception` of Hugging Face's templates."""
    raise TemplateError(message)
