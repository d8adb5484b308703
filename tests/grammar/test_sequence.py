"""Forms of several parts: each kind of part accepts what it says."""

from __future__ import annotations

from typing import Any

import pytest

from ppserve.grammar.state import GrammarFilter
from ppserve.grammar.structured_output import KINDS, FormRefused
from tests.grammar.words import PADDING, compiled, fits

SCHEMA = {"schema": {"type": "integer"}, "of": "it"}
CASES: list[tuple[Any, list[str], list[str]]] = [
    ("a\n\"\\é", ["a\n\"\\é"], ["", "a"]),
    (["a", "", SCHEMA, "b"], ["a1b", "a-7b"], ["ab", "a1", "a1.5b"]),
    ([SCHEMA, ",", {"schema": {"const": "x"}, "of": "that"}], ['1,"x"'], ["1,1", '"x","x"']),
    ({"text": "any"}, ["", "a\né"], []),
    ({"text": "no_json"}, ["", "a {\n"], [" a", "{", "[1]"]),
    ([{"until": "<x>"}, "y"], ["<x>y", "a\n<<x<x>y"], ["", "y", "<x>", "<x>a<x>y", "<x>yy"]),
    (
        [{"any_number": [{"until": "<x>"}, "y"]}, {"text": "any"}],
        ["", "a", "<x>y", "a<x>yb<x>y<x"], ["<x>z", "a<x>"],
    ),
    ({"either": ["a", ["b", "c"], SCHEMA]}, ["a", "bc", "12"], ["", "b", "ac"]),
    ([{"maybe": "a"}, {"any_number": ["b", "c"]}], ["", "a", "bc", "abcbc"], ["aa", "ab"]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "right", "wrong"), CASES)
def test_a_part_is_what_it_says(form: Any, right: list[str], wrong: list[str]) -> None:
    grammar = compiled("sequence", [form])
    assert [text for text in right if not fits(grammar, text)] == []
    assert [text for text in wrong if fits(grammar, text)] == []


def test_a_token_is_not_its_text() -> None:
    form = GrammarFilter(compiled("sequence", ["a", {"token": PADDING}, "b"]))
    assert form.accepts([], [*b"a", PADDING, *b"b"]) == 3
    assert form.is_complete([*b"a", PADDING, *b"b"])
    assert form.accepts([], [*b"ab"]) == 1
    for mask in (form.allowed([]), form.allowed([*b"a", PADDING])):
        assert mask != form.allowed([*b"a"])


def test_a_refusal_says_whose_schema_it_is() -> None:
    with pytest.raises(FormRefused, match="at /items/not: the form of f: the keyword 'not' is not enforced here"):
        compiled("sequence", ["a", {"schema": {"items": {"not": {}}}, "of": "the form of f"}])


def test_callers_cannot_ask_for_one() -> None:
    assert "sequence" not in KINDS
