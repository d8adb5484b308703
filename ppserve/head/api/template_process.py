"""The process that renders a chat template: another person's program.
It may use little memory and time here, and cannot hurt the head.

It reads a line of JSON with the template and special tokens, then one for each chat, and answers each.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from collections.abc import Collection
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SOURCE = 1 << 20
MAX_MEMORY_BYTES = 1 << 30
MAX_TEXT = 16 << 20
MAX_CPU_S = 5.0
"""For one chat. A template that takes longer ends this process."""
MARK = "\udc00"
"""Precedes special tokens that a template writes. Half a surrogate pair: not in callers' text."""


class Marks:
    """Tells special tokens that a template writes from callers' text."""

    def __init__(self, special: Collection[str]) -> None:
        texts = sorted((text for text in special if len(text) > 1), key=len, reverse=True)
        self._whole = "|".join(map(re.escape, texts)) or "(?!)"
        # A role may complete one: '<|' + role + '|>'. '</' + name + '>' is no token.
        begun = {text[:end] for text in texts for end in range(2, len(text))}
        self._begun = "|".join(re.escape(text) for text in begun if text[-1] != "/")

    def put(self, text: str) -> str:
        """A template's literal, or a variable of the model's own, with marks."""
        return re.sub(rf"{self._whole}|(?:{self._begun})\Z", rf"{MARK}\g<0>", text)

    def split(self, text: str) -> list[str]:
        """Texts without marks, and special tokens, in turn."""
        parts = re.split(f"{MARK}({self._whole})", text)
        return [part.replace(MARK, "") for part in parts]


class GenerationBlock(Extension):
    """`{% generation %}`: what transformers trains on. Here only its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def parse(source: str) -> None:
    """Raises ValueError for what is no template. Compiling would fold constants."""
    if len(source) > MAX_SOURCE:
        raise ValueError(f"it has {len(source)} characters; the limit is {MAX_SOURCE}")
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
def _compiled(source: str, *special: str) -> Template:
    environment, marks = _environment(), Marks(special)
    tree = environment.parse(source)
    for data in tree.find_all(nodes.TemplateData):
        data.data = marks.put(data.data)
    for literal in tree.find_all(nodes.Const):
        if isinstance(literal.value, str):
            literal.value = marks.put(literal.value)
    return environment.from_string(tree)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def render(source: str, special: Collection[str], variables: dict[str, Any]) -> dict[str, str]:
    """`text`, or `error`."""
    try:
        text = _compiled(source, *special).render(variables)
        return {"text": text} if len(text) <= MAX_TEXT else {"error": "the text is too long"}
    except Exception as error:
        # On unforeseen messages a template may fail in any way.
        return {"error": str(error) if isinstance(error, TemplateError) else type(error).__name__}


def main() -> None:
    """Until standard input ends, with the head."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, special = json.loads(sys.stdin.readline())
    for line in sys.stdin:
        variables = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        answer = json.dumps(render(source, special, variables))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)


if __name__ == "__main__":
    main()
