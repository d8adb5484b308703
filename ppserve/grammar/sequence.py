"""Forms of several parts, such as a call of a tool: texts around JSON, choices and repetitions.

A form is JSON. A string stands for that text, and a list for its parts, one behind the other. An object is one of

    {"token": ID}               this special token
    {"schema": S, "of": WORDS}  JSON that fits a schema, which refusals call by WORDS
    {"kind": K, "source": S}    a text of the form `StructuredOutput(K, S)`
    {"text": "any"}             any text
    {"text": "no_json"}         any text but one that begins with a blank or a bracket
    {"until": TEXT}             any text, up to and with the first TEXT
    {"either": [FORM, ...]}     one of these
    {"maybe": FORM}             this form, or nothing
    {"any_number": FORM}        this form, any number of times
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ppserve.grammar.schema import enforced
from ppserve.grammar.structured_output import FormRefused, StructuredOutput

TEXTS = {"any": r"/(?s:.*)/", "no_json": r"/(?s:[^\[{\s].*)?/"}


def rules_of(form: Any, json_rule: Callable[[Any], str], rule: Callable[[StructuredOutput], str]) -> str:
    """Return the form as the rules of a Lark grammar.

    json_rule, rule: make the right side of a rule, for an enforced schema and for texts of a form.
    Raises FormRefused for a schema or a form.
    """
    rules = _Rules(json_rule, rule)
    return "\n".join([f"start: {rules.expression(form)}", *rules.lines])


class _Rules:
    """Makes expressions, and the rules with names that they need."""

    def __init__(self, json_rule: Callable[[Any], str], rule: Callable[[StructuredOutput], str]) -> None:
        self._json_rule = json_rule
        self._rule = rule
        self.lines = [f"{name.upper()}: {pattern}" for name, pattern in TEXTS.items()]

    def expression(self, form: Any) -> str:
        """Return an expression for a form, as the right side of a rule may have it."""
        match form:
            case str():
                return json.dumps(form, ensure_ascii=False)
            case list():
                return "(" + " ".join(self.expression(each) for each in form if each != "") + ")"
            case {"token": int(token_id)}:
                return f"<[{token_id}]>"
            case {"schema": schema, "of": words}:
                return self._named("json", self._json_rule(_enforced(schema, words)))
            case {"kind": kind, "source": str(source)}:
                return self._named("form", self._rule(StructuredOutput(kind, source)))
            case {"text": str(kind)}:
                return kind.upper()
            case {"until": str(text)}:
                return self._named("until", f"ANY {json.dumps(text)}", "[lazy]")
            case {"either": list(forms)}:
                return "(" + " | ".join(map(self.expression, forms)) + ")"
            case {"maybe": inner}:
                return f"({self.expression(inner)})?"
            case {"any_number": inner}:
                return f"({self.expression(inner)})*"
        raise AssertionError(f"no form: {form!r}")

    def _named(self, name: str, right_side: str, attribute: str = "") -> str:
        name = f"{name}_{len(self.lines)}"
        self.lines.append(f"{name}{attribute}: {right_side}")
        return name


def _enforced(schema: Any, words: str) -> Any:
    """Return the schema as `enforced` makes it. A refusal names the schema by `words`."""
    try:
        return enforced(schema)
    except FormRefused as error:
        raise FormRefused(f"{words}: {error.problem}", error.pointer, error.keyword) from None
