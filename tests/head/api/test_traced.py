"""Texts that remember what the template wrote: they are those of a plain str, and no character changes sides."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jinja2
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from ppserve.head.api.template_process import compiled
from ppserve.head.api.traced import Traced, formatted, own_text, traced

OWN, CALLERS = "AB_%", "ab \n\r"
"""Characters of the template and of callers: so each shows by itself on which side it belongs."""

TEXTS = st.text(OWN + CALLERS, max_size=8)
PIECES = st.text(OWN + CALLERS, min_size=1, max_size=2)
METHODS: dict[str, Callable[[str, str, str, int], Any]] = {
    "split": lambda a, b, _, n: a.split(b, n),
    "split at white space": lambda a, *_: a.split(),
    "split at white space, at most": lambda a, _b, _c, n: a.split(None, n),
    "rsplit": lambda a, b, _, n: a.rsplit(b, n),
    "rsplit at white space": lambda a, _b, _c, n: a.rsplit(maxsplit=n),
    "split by name": lambda a, b, *_: a.split(sep=b),
    "partition": lambda a, b, *_: a.partition(b),
    "rpartition": lambda a, b, *_: a.rpartition(b),
    "splitlines": lambda a, *_: a.splitlines(),
    "splitlines with ends": lambda a, *_: a.splitlines(True),
    "strip": lambda a, *_: a.strip(),
    "strip characters": lambda a, b, *_: a.strip(b),
    "lstrip": lambda a, b, *_: a.lstrip(b),
    "rstrip": lambda a, b, *_: a.rstrip(b),
    "removeprefix": lambda a, b, *_: a.removeprefix(b),
    "removesuffix": lambda a, b, *_: a.removesuffix(b),
    "replace": lambda a, b, c, n: a.replace(b, c, n),
    "join": lambda a, b, c, _: a.join([b, c, b]),
    "join characters": lambda a, b, *_: b.join(a),
    "add": lambda a, b, *_: a + b,
    "multiply": lambda a, _b, _c, n: a * n + n * a,
    "a character": lambda a, b, _c, n: (b + a)[n % len(b + a)],
    "a slice": lambda a, _b, _c, n: a[n : n + 4 : 2],
    "backwards": lambda a, *_: a[::-1],
    "characters": lambda a, *_: [*a, *reversed(a)],
    "str": lambda a, *_: str(a),
}


@pytest.mark.parametrize("name", METHODS)
@given(TEXTS, PIECES, PIECES, st.integers(-1, 3))
def test_parts_of_texts_stay_on_their_sides(name: str, text: str, piece: str, other: str, count: int) -> None:
    colour = lambda text: Traced(text, bytes(char in OWN for char in text))  # noqa: E731
    expected = METHODS[name](text, piece, other, count)
    found = METHODS[name](colour(text), colour(piece), colour(other), count)
    assert found == expected
    assert type(found) is Traced if isinstance(expected, str) else type(found) is type(expected)
    for part in [found] if isinstance(found, str) else found:
        assert part.own == colour(part).own


@pytest.mark.parametrize("name", ["lower", "upper", "capitalize", "title", "swapcase", "casefold"])
@given(st.text("aBßİǆ_ 1", max_size=6))
def test_other_letters_stay_on_the_sides_of_theirs(name: str, text: str) -> None:
    """Where one becomes several, none is the template's."""
    found = getattr(Traced(text, bytes(char == "1" for char in text)), name)()
    assert found == getattr(text, name)()
    assert len(found.own) == len(found)
    assert found.own in (bytes(char == "1" for char in found), bytes(len(found)))


@pytest.mark.parametrize(
    ("form", "arguments"),
    [
        ("A%sB", ("b",)), ("A%(x)sB%%", {"x": "b"}), ("%5s_%.1s%d", ("ab", "ba", 7)), ("%s", "ab"),
        ("%s%s", ("A", "a🐈")),
    ],
)  # fmt: skip
def test_a_formatted_text_is_of_both(form: str, arguments: Any) -> None:
    found = own_text(form) % arguments
    assert found == form % arguments
    assert [char for char, own in zip(str(found), found.own, strict=True) if not own] == [*"".join(
        char for char in found if char in "Aab🐈" and char in str(arguments)
    )]  # fmt: skip


def test_what_cannot_be_told_is_a_caller_s() -> None:
    for found in (
        own_text("%s") % (["<s>"],),
        own_text("%s") % (traced({"<s>": 1}),),
        own_text("%s") % ([traced({"<s>": "a"})],),
        formatted(str.format, own_text("{}"), own_text("{}"), traced({"<s>": 1})),
        formatted(str.format, own_text("{0}"), own_text("{0}"), {own_text("a"): traced({"<s>": 1})}),
        own_text("%r") % "<s>",
        own_text("%s") % chr(0xF0000 + ord("a")),
        own_text("%s" + chr(0x100000 + ord("a"))) % "a",
        Traced("%s", bytes(2)) % "a",
        own_text("a").replace("", "b"),
        own_text("a").center(5),
        own_text("a").translate({97: "b"}),
    ):
        assert 1 not in getattr(found, "own", b"")


ENDS = [
    *(".strip()", ".lstrip('a')", ".split() | join(' ')", ".splitlines()[0]", "[:9] * 2", " | trim", " | reverse"),
    *(" | list | join", " | string", " | default('A')", " | tojson", " | length", " | first", " | last"),
    *(" | safe", " | e", " | indent", " | title", " | center(9)", " | truncate(4)", " | wordwrap(3)", " | upper"),
]
EXPRESSIONS = st.recursive(
    st.sampled_from(["a", "b", "m.text", "m['more'][0]", "AB", "_A", "own"])
    | st.text(OWN.replace("%", "") + "ab ", max_size=4).map(json.dumps),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda two: "({} + {})".format(*two)),
        st.tuples(inner, inner).map(lambda two: "({} ~ {})".format(*two)),
        st.tuples(inner, inner).map(lambda two: "({}).split(({}) or 'A')[-1]".format(*two)),
        st.tuples(inner, inner).map(lambda two: "({}).replace({}, 'B')".format(*two)),
        st.tuples(inner, inner).map(lambda two: "({} | replace('a', {}))".format(*two)),
        st.tuples(inner, inner).map(lambda two: "[{}, {}] | join('_')".format(*two)),
        st.tuples(inner, inner).map(lambda two: "(({0}) if ({1}) in ({0}) else ({1}))".format(*two)),
        st.tuples(inner, inner).map(lambda two: "(({0}) if ({0}).endswith({1}) else 'A' ~ ({1}))".format(*two)),
        st.tuples(inner, inner).map(lambda two: "('A%s_%s' % ({}, {}))".format(*two)),
        st.tuples(inner, inner).map(lambda two: "('A{{}}_{{}}'.format({}, {}))".format(*two)),
        st.tuples(inner, inner).map(lambda two: "('%s_%s' | format({}, {}))".format(*two)),
        st.tuples(inner, st.integers(-3, 3), st.integers(-3, 3)).map(lambda cut: "({})[{}:{}]".format(*cut)),
        st.tuples(inner, st.sampled_from(ENDS)).map(lambda two: "({}){}".format(*two)),
    ),
    max_leaves=6,
)  # fmt: skip
STATEMENTS = st.sampled_from([
    "{{{{ {0} }}}}A{{{{ {1} }}}}",
    "{{% set v = {0} %}}{{{{ v ~ ({1}) }}}}",
    "{{% set n = namespace(t='') %}}{{% for c in {0} %}}{{% set n.t = n.t+c %}}{{% endfor %}}{{{{ n.t ~ {1} }}}}",
    "{{% macro f(x) %}}B{{{{ x }}}}_{{% endmacro %}}{{{{ f({0}) | trim }}}}{{{{ f({1})[1:] }}}}",
    "{{% set v %}}A{{{{ {0} }}}}{{% endset %}}{{{{ v | length }}}}{{{{ v ~ ({1}) }}}}",
    "{{% for k in m %}}{{{{ k + ({0}) }}}}{{% endfor %}}{{% if {1} %}}_{{% endif %}}",
    "{{% generation %}}{{{{ {0} }}}}{{% endgeneration %}}{{% filter trim %}}{{{{ {1} }}}}{{% endfilter %}}",
])  # fmt: skip
CALLERS_TEXTS = st.text("ab \nAB_", max_size=6)


@pytest.mark.slow
@given(STATEMENTS, EXPRESSIONS, EXPRESSIONS, CALLERS_TEXTS, CALLERS_TEXTS)
@settings(max_examples=80)
def test_any_template_makes_transformers_text(statement: str, one: str, other: str, a: str, b: str) -> None:
    """It fails where transformers fails."""
    source = statement.format(one, other)
    variables: dict[str, Any] = {"a": a, "b": b, "m": {"text": b + a, "more": [a], a: b}}
    try:
        ((expected,), _) = transformers.utils.chat_template_utils.render_jinja_template(
            [[]], chat_template=source, own="A_", **variables
        )
    except Exception as error:
        with pytest.raises(type(error)):
            compiled(source)[0].render(traced(variables), own=own_text("A_"))
        return
    found = compiled(source)[0].render(traced(variables), own=own_text("A_"))
    assert found == expected


@pytest.mark.slow
@given(STATEMENTS, EXPRESSIONS, EXPRESSIONS, st.text("xyz ", max_size=6), st.text("xyz ", max_size=6))
@settings(max_examples=80)
def test_no_template_takes_a_caller_s_characters_for_its_own(
    statement: str, one: str, other: str, a: str, b: str
) -> None:
    """These here are in no template; what has become of them is in none either."""
    variables: dict[str, Any] = {"a": a, "b": b, "m": {"text": b + a, "more": [a], a: b}}
    try:
        found = compiled(statement.format(one, other))[0].render(traced(variables), own=own_text("A_"))
    except (jinja2.TemplateError, TypeError, ValueError):
        return
    assert isinstance(found, Traced)
    assert not {char for char, own in zip(str(found), found.own, strict=True) if own} & {*"xyz"}
