"""The process that renders a chat template: another person's program.
It may use little memory and time here, and cannot hurt the head.

It reads the template's source as a line of JSON, then a line for each chat, and answers each with one.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_MEMORY_BYTES = 1 << 30
MAX_TEXT = 16 << 20
MAX_CPU_S = 5.0
"""For one chat. A template that takes longer ends this process."""


class GenerationBlock(Extension):
    """`{% generation %}`: what transformers trains on. Here only its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def parse(source: str) -> None:
    """Raises ValueError for what is no template. Compiling would fold constants."""
    try:
        _environment().parse(source)
    except (TemplateError, RecursionError, MemoryError) as error:
        raise ValueError(str(error) or type(error).__name__) from error


def _environment() -> ImmutableSandboxedEnvironment:
    """As transformers has it, in Jinja's sandbox."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationBlock]
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = lambda value, **more: json.dumps(value, **{"ensure_ascii": False, **more})
    return environment


@cache
def _compiled(source: str) -> Template:
    return _environment().from_string(source)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def render(source: str, variables: dict[str, Any]) -> dict[str, str]:
    """`text`, or `error`."""
    try:
        text = _compiled(source).render(variables)
        return {"text": text} if len(text) <= MAX_TEXT else {"error": "the text is too long"}
    except Exception as error:
        # On unforeseen messages a template may fail in any way.
        return {"error": str(error) if isinstance(error, TemplateError) else type(error).__name__}


def main() -> None:
    """Until standard input ends, with the head."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source: str = json.loads(sys.stdin.readline())
    for line in sys.stdin:
        variables = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        answer = json.dumps(render(source, variables))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)


if __name__ == "__main__":
    main()
