"""The process that renders a chat template, which is another person's program.

Here it has little memory and time, and cannot hurt the head. The process reads a line of JSON with the template,
all special tokens, and those that have names; then a line for each chat, to which it answers with a line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache, partial
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes, pass_eval_context
from jinja2.ext import Extension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from ppserve.head.api.traced import Traced, formatted, joined, own_text, traced
from ppserve.process.limited import serve

MAX_SOURCE = 1 << 20
MAX_MEMORY_BYTES = 1 << 30
MAX_TEXT = 16 << 20
MAX_CPU_S = 5.0
"""One chat may take so long. A template that takes longer ends this process."""


class GenerationBlock(Extension):
    """The block `{% generation %}`, which marks what transformers trains on. Only its content is rendered here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def parse(source: str) -> None:
    """Raise ValueError for a source that is no template. It is not compiled: that would compute its constants."""
    if len(source) > MAX_SOURCE:
        raise ValueError(f"it has {len(source)} characters; the limit is {MAX_SOURCE}")
    try:
        _Environment().parse(source)
    except (TemplateError, RecursionError, MemoryError) as error:
        raise ValueError(str(error) or type(error).__name__) from error


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox as transformers sets it up, but with texts that are traced.

    literals: the texts that the template itself holds.
    """

    concat = staticmethod(joined)

    def __init__(self) -> None:
        extensions = ["jinja2.ext.loopcontrols", GenerationBlock]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_shown)
        self.literals: list[Traced] = []
        self.globals |= {
            "raise_exception": _refuse,
            "strftime_now": lambda format: datetime.now().strftime(format),
        }
        self.filters |= {"tojson": _to_json, "join": _join, "title": _title}

    def wrap_str_format(self, value: Any) -> Any:
        form = super().wrap_str_format(value)
        return None if form is None else partial(formatted, form, value.__self__)


class _Literals(NodeTransformer):
    """Rewrites a template: it takes its own texts from `literals`, and `~` joins texts that are traced."""

    def __init__(self, literals: list[Traced]) -> None:
        self._literals = literals

    def _literal(self, text: str) -> nodes.Node:
        self._literals.append(own_text(text))
        place = nodes.Const(len(self._literals) - 1)
        return nodes.Getitem(nodes.EnvironmentAttribute("literals"), place, "load")

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return self._literal(node.data)

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        return self._literal(node.value) if isinstance(node.value, str) else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        texts = nodes.List([self.visit(each) for each in node.nodes])
        return nodes.Filter(texts, "join", [], [], None, None)


def _shown(value: Any) -> Any:
    """Return a number as the template's own text: '<|image_' ~ loop.index ~ '|>' may be a token."""
    return own_text(str(value)) if type(value) in (int, float) else value


@pass_eval_context
def _join(context: nodes.EvalContext, value: Any, d: str = Traced(), attribute: Any = None) -> str:
    return str(FILTERS["join"](context, value if attribute else map(_shown, value), d, attribute))


def _title(value: Any) -> str:
    text = FILTERS["title"](value)
    return Traced(text, value.own if isinstance(value, Traced) and len(value) == len(text) else None)


def _to_json(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


@cache
def compiled(source: str) -> tuple[Template, bool]:
    """Return the template, and whether it takes a content in parts. As vLLM does, this asks whether it loops over
    a content."""
    environment = _Environment()
    tree = environment.parse(source)
    takes_parts = any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))
    return environment.from_string(_Literals(environment.literals).visit(tree)), takes_parts


def _is_content(node: nodes.Node | None) -> bool:
    """Return whether it is `content`, a value's `content`, or some of that."""
    match node:
        case nodes.Name(name="content") | nodes.Getattr(attr="content"):
            return True
        case nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Getitem(arg=nodes.Slice()) | nodes.Filter():
            return _is_content(node.node)
    return False


def _split(text: Traced, special: Sequence[str]) -> list[str]:
    """Return texts and special tokens in turn. A special token is one that the template wrote from end to end."""
    words = sorted((text for text in special if len(text) > 1), key=len, reverse=True)
    whole = re.compile("|".join(map(re.escape, words)) or "(?!)")
    parts, at = [], 0
    for own in re.finditer(b"\1+", text.own):
        for token in whole.finditer(text, *own.span()):
            parts += [text[at : token.start()], token[0]]
            at = token.end()
    return [*parts, text[at:]]


def render(
    source: str, special: Sequence[str], tokens: Mapping[str, str], variables: dict[str, Any]
) -> dict[str, Any]:
    """Return `parts`, which are texts and special tokens in turn, or `error`.

    tokens: special tokens, by their names in templates. Roles are known words, so a template may make a token of
    one: '<|' + role + '|>'.
    """
    try:
        template, takes_parts = compiled(source)
        variables = traced(variables)
        for message in variables["messages"]:
            message["role"] = own_text(message["role"])
            if isinstance(message.get("content"), list) and not takes_parts:
                message["content"] = joined((part["text"] for part in message["content"]), "\n")
        text = template.render(variables | {name: own_text(token) for name, token in tokens.items()})
        return {"parts": _split(joined([text]), special)} if len(text) <= MAX_TEXT else {"error": "it is too long"}
    except Exception as error:
        # If messages are not as a template expects, it may fail in any way.
        return {"error": str(error) if isinstance(error, TemplateError) else type(error).__name__}


def _begin(line: str) -> Callable[[str], str]:
    source, special, tokens = json.loads(line)
    return lambda question: json.dumps(render(source, special, tokens, json.loads(question)))


def main() -> None:
    """Serve until standard input ends, as it does with the head."""
    serve(_begin, MAX_CPU_S, MAX_MEMORY_BYTES)


if __name__ == "__main__":
    main()
