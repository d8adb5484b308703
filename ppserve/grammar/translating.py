"""A form becomes the text that llguidance compiles. Only this module knows its dialects."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from ppserve.grammar.pattern import escaped, translated
from ppserve.grammar.schema import MAX_OPTIONS, enforced
from ppserve.grammar.sequence import rules_of
from ppserve.grammar.structured_output import FormRefused, StructuredOutput

JSON_OPTIONS: Any = {
    # A character has one spelling, so no other property can be a named one in disguise ("\u0061" for "a").
    "json_allowed_escapes": 'nrbtf\\"',
    # Between any two parts: a blank, or a new line with what indents it. With more, a small model may write blanks
    # until its answer is cut.
    "whitespace_pattern": r"\x20|\x0D?\x0A[\x20\x09]{0,20}",
}
LARK_OPTIONS = {
    # Every token that fits may be drawn, not only those that a tokenizer would make of text that must follow.
    "no_forcing": True
}
LARK_LITERAL = re.compile(
    r'(?P<comment>(?:\#|//)[^\n]*)|"(?:\\.|[^"\\])*"i?|/(?:\\.|[^/\\])+/[imslux]*|(?P<special><[^<>\s]+>)'
    r"|%(?P<directive>\w+)|(?P<attribute>=)|(?P<other>@[\w-]+)",
    re.DOTALL,
)
EMPTY = "(?:)"
DIRECTIVES = ("ignore", "import")
GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


def translate(output: StructuredOutput) -> str:
    """Return the text that llguidance compiles. Raises FormRefused."""
    match output.kind:
        case "grammar":
            return _from_lark(_lark(output.source))
        case "sequence":
            return _from_lark(rules_of(_read_json(output.source), _json_rule, _rule))
    return _from_lark(f"start: {_rule(output)}")


def _rule(output: StructuredOutput) -> str:
    """Return the right side of a rule for texts of a form."""
    match output.kind:
        case "json_object" if output.source:
            raise FormRefused("json_object has no source")
        case "json_object":
            return _json_rule({"type": "object"})
        case "json_schema":
            schema = enforced(_read_json(output.source))
            if schema is False:
                raise FormRefused("no value fits the schema `false`")
            return _json_rule(schema)
        case "regex":
            return f"/{translated(output.source, _refused_expression) or EMPTY}/"
        case "choice":
            return f"/{_choice(_read_json(output.source))}/"
    raise AssertionError(f"no rule: {output.kind}")


def _json_rule(schema: Any) -> str:
    """Return the right side of a rule for the values that fit an enforced schema."""
    schema = {} if schema is True else schema
    return f"%json {json.dumps({'x-guidance': JSON_OPTIONS, **schema})}"


def _from_lark(rules: str) -> str:
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_lark(f"%llguidance {json.dumps(LARK_OPTIONS)}\n{rules}"))


def _read_json(source: str) -> Any:
    """Read JSON. Raises FormRefused also for numbers that JSON does not have, and for a name that stands twice in
    an object, both of which Python would read."""
    try:
        return json.loads(source, parse_constant=_refuse_constant, object_pairs_hook=_without_repeats)
    except RecursionError:
        raise FormRefused("it is nested too deeply to be read") from None
    except ValueError as error:
        raise FormRefused(f"it is no JSON: {error}") from None


def _refuse_constant(text: str) -> NoReturn:
    raise FormRefused(f"{text} is no number of JSON")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise FormRefused(f"the name {repeated[:100]!r} stands twice in an object")
    return found


def _refused_expression(problem: str) -> FormRefused:
    return FormRefused(f"this regular expression is not served: {problem}")


def _choice(options: Any) -> str:
    if not isinstance(options, list) or not options or not all(isinstance(each, str) for each in options):
        raise FormRefused("is no list of strings")
    if len(options) > MAX_OPTIONS:
        raise FormRefused(f"has {len(options)} strings; the limit is {MAX_OPTIONS}")
    if any(re.search("[\ud800-\udfff]", each) for each in options):
        raise FormRefused("a string has half of a surrogate pair")
    return "|".join(f"(?:{escaped(each)})" for each in options)


def _lark(source: str) -> str:
    """Return the grammar, if it is one of text alone.

    Raises FormRefused for special tokens, for schemas, which nobody has checked, and for attributes, which change
    what is drawn.
    """
    if GBNF_RULE.search(source):
        from llguidance.gbnf_to_lark import gbnf_to_lark

        try:
            source = str(gbnf_to_lark(source)).removeprefix("%llguidance {}")
        except Exception as error:  # the converter raises many kinds for what is no grammar
            raise FormRefused(f"it is no grammar in GBNF: {error}") from None
    for found in LARK_LITERAL.finditer(source):
        if found["special"]:
            raise FormRefused(f"special tokens are not served in a grammar: {found['special'][:100]}")
        if found["directive"] and found["directive"] not in DIRECTIVES:
            raise FormRefused(f"%{found['directive']} is not served in a grammar")
        if found["attribute"]:
            raise FormRefused("attributes of rules (name=value) are not served in a grammar")
        if found["other"]:
            raise FormRefused(f"other grammars are not served in a grammar: {found['other'][:100]}")
    return source
