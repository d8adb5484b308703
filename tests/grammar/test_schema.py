"""What a schema lets an answer have, judged by `jsonschema`; and what is refused, by name and place."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from ppserve.grammar.schema import MAX_DEPTH, enforced
from ppserve.grammar.structured_output import FormRefused
from tests.grammar.words import compiled, drawn, fits

PERSON = {
    "title": "Person",
    "type": "object",
    "properties": {
        "name": {"type": "string", "description": "any", "minLength": 1},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "born": {"type": "string", "format": "date"},
        "pets": {"type": "array", "items": {"$ref": "#/$defs/Pet"}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"Pet": {"enum": ["cat", "dog"]}},
}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (PERSON, ['{"name": "a", "age": 3}'], ['{"name": "a"}', '{"name": "", "age": 3}']),
        (PERSON, ['{"name":"a","age":3,"pets":["cat"]}'], ['{"name":"a","age":3,"pets":["cow"]}']),
        (PERSON, ['{"name":"a","age":0,"born":"2024-02-29"}'], ['{"name":"a","age":0,"born":"2023-02-29"}']),
        ({"format": "date"}, ['"2000-02-29"', "1"], ['"1900-02-29"', '"2023-04-31"', '"0000-01-01"']),
        ({"format": "time"}, ['"23:59:59.5Z"'], ['"22:59:60Z"', '"24:00:00Z"']),
        ({"format": "date-time"}, ['"2024-02-29T01:02:03+01:00"'], ['"2023-02-29T01:02:03Z"']),
        ({"format": "date", "pattern": "^2"}, ['"2000-02-29"'], ['"1999-02-28"']),
        ({"properties": {"a": {"type": "integer"}}}, ['{"a": 1}', '{"b": "x"}'], ['{"\\u0061": "x"}']),
        ({"type": "object", "minProperties": 1}, ['{"a": 1}'], ["{}"]),
        ({"pattern": "^.$"}, ['"x"', '"é"'], ['"\\r"', '"\\n"', '"\u2028"', '"xy"']),
        ({"pattern": "^\\s$"}, ['"\\t"', '"\u00a0"', '"\ufeff"'], ['"\u0085"', '"x"']),
        ({"pattern": "^[\\d_-]+$"}, ['"0-_"'], ['"٣"', '"a"']),
        ({"pattern": "b{2,3}?c"}, ['"abbc"'], ['"abc"']),
        ({"pattern": "^a&&b$"}, ['"a&&b"'], ['"ab"']),
        ({"pattern": "^[a&&b]+$"}, ['"&ab"'], ['"c"', '"[a"']),
        ({"maxLength": 2.0}, ['"ab"', '"😀😀"'], ['"abc"']),
        ({"const": 1.0}, ["1"], ["2", "true"]),
        ({"const": {"a": [1, None]}}, ['{"a": [1, null]}'], ['{"a": [1]}']),
        ({"enum": ["a", "tab\t"]}, ['"a"', '"tab\\t"'], ['"b"']),
        ({"exclusiveMinimum": 2, "type": "number"}, ["2.5"], ["2", "1.9"]),
        (True, ["1", "[]"], ["", "x"]),
        ({}, ['{"a": [true]}'], ["{", "[1,]"]),
        ({"type": "string", "default": 1, "x-order": 3, "examples": [{"not": {}}]}, ['"a"'], ["1"]),
        ({"patternProperties": {"^x": {"type": "integer"}}}, ['{"x1": 1, "y": "a"}'], ['{"x1": "a"}']),
        ({"definitions": {"a/b": {"type": "null"}}, "$ref": "#/definitions/a~1b"}, ["null"], ["1"]),
    ],
)  # fmt: skip
def test_a_schema_is_enforced(schema: Any, right: list[str], wrong: list[str]) -> None:
    grammar = compiled("json_schema", schema)
    assert [text for text in right if not fits(grammar, text)] == []
    assert [text for text in wrong if fits(grammar, text)] == []


REFUSED: list[tuple[Any, str, str]] = [
    ({"properties": {"a/b": {"items": {"not": {}}}}}, "/properties/a~1b/items/not", "not"),
    *(({word: {}}, f"/{word}", word) for word in ("if", "contains", "nullable", "foo")),
    ({"propertyNames": {"pattern": "a"}}, "/propertyNames", "propertyNames"),
    ({"nullable": 0}, "/nullable", "nullable"),
    ({"uniqueItems": True}, "/uniqueItems", "uniqueItems"),
    ({"type": "array", "items": [{}]}, "/items", ""),
    ({"x-guidance": {"lenient": True}}, "/x-guidance", "x-guidance"),
    ({"allOf": [{}, {"$ref": "http://a/b"}]}, "/allOf/1/$ref", "$ref"),
    ({"examples": [{"not": {}}], "$ref": "#/examples/0"}, "/$ref", "$ref"),
    ({"$ref": "#/properties"}, "/$ref", "$ref"),
    ({"properties": {"a": {"$id": "b"}}}, "/properties/a/$id", "$id"),
    ({"$schema": "http://json-schema.org/draft-04/schema#"}, "/$schema", "$schema"),
    ({"minProperties": 2}, "/minProperties", "minProperties"),
    ({"const": 2**53 + 1}, "/const", "const"),
    ({"enum": ["a", ["\u0001"]]}, "/enum/1/0", "enum"),
    ({"minimum": 1e300}, "/minimum", "minimum"),
    ({"minLength": -1}, "/minLength", "minLength"),
    ({"minLength": True}, "/minLength", "minLength"),
    ({"maxItems": 10**6}, "/maxItems", "maxItems"),
    ({"multipleOf": 0}, "/multipleOf", "multipleOf"),
    ({"exclusiveMinimum": True}, "/exclusiveMinimum", "exclusiveMinimum"),
    ({"type": "int"}, "/type", "type"),
    ({"required": "a"}, "/required", "required"),
    ({"enum": []}, "/enum", "enum"),
    ({"anyOf": []}, "/anyOf", "anyOf"),
    ({"properties": []}, "/properties", "properties"),
    ({"format": "hostname"}, "/format", "format"),
    ({"patternProperties": {"\\d": True, "[0-9]": {}}}, "/patternProperties", "patternProperties"),
    *(
        ({"pattern": pattern}, "/pattern", "pattern")
        for pattern in (
            *(r"a(?=b)", r"(?i)a", r"\bfoo", r"(a)\1", r"\p{L}", r"\A", r"[^\S]", "[]", "[^]", "[a", "(a", "a)"),
            *("a{x}", "\\", r"\ud83d", "a{20000}", r"[\d-z]"),
        )
    ),
    ({"properties": {"a": 1}}, "/properties/a", ""),
]


@pytest.mark.parametrize(("schema", "pointer", "keyword"), REFUSED)
def test_what_is_not_enforced_is_refused_with_its_place(schema: Any, pointer: str, keyword: str) -> None:
    with pytest.raises(FormRefused) as refused:
        compiled("json_schema", schema)
    assert (refused.value.pointer, refused.value.keyword) == (pointer, keyword)
    assert pointer in str(refused.value)


def test_schemas_that_lie_too_deep_are_refused() -> None:
    schema: Any = True
    for _ in range(MAX_DEPTH):
        schema = {"items": schema}
    assert enforced(schema) == schema
    with pytest.raises(FormRefused, match=f"more than {MAX_DEPTH} deep"):
        enforced({"items": schema})


@pytest.mark.parametrize("value", [float("inf"), 1.5, -1, -float("inf")])
def test_a_number_of_items_is_whole_and_bounded(value: float) -> None:
    with pytest.raises(FormRefused) as refused:
        enforced({"maxItems": value})
    assert (refused.value.pointer, refused.value.keyword) == ("/maxItems", "maxItems")


def test_annotations_are_not_compiled() -> None:
    schema = {"title": "a", "$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "b", "x-c": 1}
    assert enforced({**schema, "type": "null", "uniqueItems": False}) == {"type": "null"}
    for names in (True, {}, {"type": "string"}):
        assert enforced({"type": "object", "propertyNames": names, "nullable": False}) == {"type": "object"}


NAMES = st.sampled_from(["a", "b", "c\n", "é", "x1"])
TEXTS = {"minLength": st.integers(0, 3), "pattern": st.sampled_from(["^a", "b$", "[^x]", "^(a|b)*$"])}
NUMBERS = {
    "minimum": st.integers(-30, 0),
    "exclusiveMaximum": st.sampled_from([1, 0.5, 100]),
    "multipleOf": st.sampled_from([1, 3, 0.5]),
}
LEAVES = st.one_of(
    st.sampled_from([{}, True, {"type": ["null", "boolean"]}]),
    st.sampled_from([{"const": [1, {"a": "b"}]}, {"enum": [1, "a", 2.5]}]),
    st.fixed_dictionaries({"type": st.just("string")}, optional=TEXTS),
    st.fixed_dictionaries({"type": st.sampled_from(["integer", "number"])}, optional=NUMBERS),
    st.sampled_from([{"type": "string", "format": name} for name in ("date", "ipv4", "uuid", "duration")]),
)


def grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.dictionaries(NAMES, inner, max_size=3)
    return st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": properties},
            optional={
                "required": st.lists(NAMES, max_size=2, unique=True),
                "additionalProperties": st.one_of(st.booleans(), inner),
                "maxProperties": st.integers(0, 3),
                "minProperties": st.integers(0, 1),
                "patternProperties": st.dictionaries(st.sampled_from(["^x", "^[a-b]$"]), inner, max_size=1),
            },
        ),
        st.fixed_dictionaries(
            {"type": st.just("array"), "items": inner},
            optional={
                "prefixItems": st.lists(inner, min_size=1, max_size=2),
                "minItems": st.integers(0, 2),
                "maxItems": st.integers(1, 3),
            },
        ),
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=3)}),
        st.fixed_dictionaries({"allOf": st.lists(inner, min_size=1, max_size=2)}),
        st.fixed_dictionaries({"oneOf": st.lists(inner, min_size=1, max_size=2)}),
    )


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(schema=st.recursive(LEAVES, grown, max_leaves=5), seed=st.integers(0, 2**32))
def test_random_answers_to_random_schemas_are_valid(schema: Any, seed: int) -> None:
    try:
        grammar = compiled("json_schema", schema)
    except FormRefused:
        return
    rng = random.Random(seed)
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    for _ in range(3):
        answer = drawn(grammar, rng)
        if answer is not None:
            validator.validate(json.loads(answer))
