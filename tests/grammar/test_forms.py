"""Forms that are no schemas."""

from __future__ import annotations

import pytest

from ppserve.grammar.structured_output import FormRefused, Kind, StructuredOutput
from ppserve.grammar.translating import translate
from tests.grammar.words import compiled, fits


@pytest.mark.parametrize(
    ("kind", "source", "right", "wrong"),
    [
        ("json_object", "", ['{"a": 1}', "{}"], ["[]", "1"]),
        ("regex", "a+|b.", ["aa", "bé"], ["ab", "b\n", ""]),
        ("regex", "^x$", ["x"], ["xx"]),
        ("regex", "", [""], ["x"]),
        ("regex", "a//b/[/]", ["a//b//"], ["a"]),
        ("choice", '["yes", "no (or .*)", "", "\\n"]', ["yes", "no (or .*)", "", "\n"], ["y", "no (or x)"]),
        ("grammar", 'start: "a" b+\nb: "b" | /c/ // %json <x> =', ["abc"], ["a", "d"]),
        ("grammar", 'root ::= "a" root | [b-c]', ["aab", "c"], ["a", "abc"]),
        ("grammar", 'start: "<b>" /[%=]/ "@a"', ["<b>=@a"], ["<b>"]),
    ],
)
def test_a_form_is_enforced(kind: Kind, source: str, right: list[str], wrong: list[str]) -> None:
    grammar = compiled(kind, source)
    assert [text for text in right if not fits(grammar, text)] == []
    assert [text for text in wrong if fits(grammar, text)] == []


@pytest.mark.parametrize(
    ("kind", "source", "problem"),
    [
        ("json_schema", "{", "is no JSON"),
        ("json_schema", '{"a": NaN}', "NaN is no number"),
        ("json_schema", '{"type": "null", "type": "string"}', "'type' stands twice"),
        ("json_schema", "[" * 100_000, "nested too deeply"),
        ("json_schema", "false", "no value fits"),
        ("json_schema", '{"pattern": "^a$", "const": "b"}', "nsatisfiable|Regex is empty"),
        ("choice", "[]", "no list of strings"),
        ("choice", '"a"', "no list of strings"),
        ("choice", "[" + '"a",' * 20_000 + '"a"]', "limit is 10000"),
        ("choice", '["\\ud800"]', "surrogate"),
        ("regex", "(a", "a group is not closed"),
        ("grammar", "start: <|end|>", "special tokens"),
        ("grammar", 'start: %json {"not": {}}', "%json"),
        ("grammar", 'start: a\na[temperature=0.5]: "b"', "attributes"),
        ("grammar", "start: @other", "other grammars"),
        ("grammar", "start: (", "at|expected"),
        ("grammar", 'root ::= ("a"', "GBNF"),
    ],
)
def test_what_is_no_form_is_refused(kind: Kind, source: str, problem: str) -> None:
    with pytest.raises(FormRefused, match=problem):
        compiled(kind, source)


def test_a_digest_tells_forms_apart() -> None:
    forms = [StructuredOutput("regex", "a"), StructuredOutput("regex", "b"), StructuredOutput("grammar", "a")]
    assert len({form.digest() for form in forms}) == 3
    assert StructuredOutput("regex", "a").digest() == forms[0].digest()


def test_blanks_between_parts_are_bounded() -> None:
    grammar = compiled("json_object")
    for text in ('{%s"a":1}', '{"a"%s:1}', '{"a":%s1}', '{"a":1%s}', '{"a":[1,%s2]}', '{"a":{}%s,"b":""}'):
        for blanks in ("", " ", "\n", "\r\n" + "\t" * 20, "\n" + " " * 20):
            assert fits(grammar, text % blanks), text % blanks
        for blanks in ("  ", "\n\n", "\t", "\n" + " " * 21, " \n"):
            assert not fits(grammar, text % blanks), text % blanks


def test_json_object_has_no_source() -> None:
    assert translate(StructuredOutput("json_object")) == translate(StructuredOutput("json_object", ""))
