"""Answers of a given form from pipelines of the built-in model: valid, and the same however they are computed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from ppserve import InvalidRequest, Pipeline, StructuredOutput
from tests.library.mixed import assert_same, tiny, together

pytestmark = pytest.mark.slow

NAME = {"type": "string", "maxLength": 8}
SCHEMAS: dict[str, dict[str, Any]] = {
    "object": {
        "type": "object",
        "properties": {"name": NAME, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "list": {"type": "array", "items": {"enum": ["red", "green", None, 3]}, "minItems": 1, "maxItems": 4},
    "union": {"anyOf": [{"const": "none"}, {"type": "integer", "minimum": -5, "maximum": 5}, {"type": "boolean"}]},
    "pattern": {"type": "string", "pattern": "^[A-Z][a-z]{1,5}$"},
    "recursive": {
        "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}},
        "$ref": "#/$defs/tree",
    },
}


@pytest.fixture(scope="module")
def one_stage() -> Iterator[Pipeline]:
    with tiny(speculate=0) as pipeline:
        yield pipeline


@pytest.fixture(scope="module")
def blanks(one_stage: Pipeline) -> dict[int, float]:
    """A bias against tokens of white space, of which a small model would write its answers full."""
    tokenizer = one_stage._tokenizer
    ids = range(one_stage.model.architecture.vocab_size)
    return {token_id: -100.0 for token_id in ids if not tokenizer.text_bytes(token_id).strip()}


def form(schema: Any) -> StructuredOutput:
    return StructuredOutput("json_schema", json.dumps(schema))


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_are_valid(one_stage: Pipeline, blanks: dict[int, float], name: str) -> None:
    """All but those that are cut, which are few."""
    asked: dict[str, Any] = {"structured_output": form(SCHEMAS[name]), "n": 4, "max_tokens": 150}
    answers = one_stage.complete_all(["Once", "The miller", ""], logit_bias=blanks, seed=1, **asked)
    ends = [sequence.finish.reason for answer in answers for sequence in answer.sequences if sequence.finish]
    assert set(ends) <= {"EOS", "MAX_TOKENS"}
    assert ends.count("EOS") >= 8
    texts = {sequence.text for answer in answers for sequence in answer.sequences}
    assert len(texts) > 1, "each sequence draws its own"
    for answer in answers:
        for sequence in answer.sequences:
            if sequence.finish is not None and sequence.finish.reason == "EOS":
                jsonschema.validate(json.loads(sequence.text), SCHEMAS[name])


def test_other_kinds_of_forms(one_stage: Pipeline, blanks: dict[int, float]) -> None:
    def text(kind: Any, source: str = "") -> str:
        asked = StructuredOutput(kind, source)
        return one_stage.complete("Once", structured_output=asked, seed=5, max_tokens=150, logit_bias=blanks).text

    assert re.fullmatch("(ab|c){2,3}", text("regex", "(ab|c){2,3}"))
    assert text("choice", '["yes", "no, never"]') in ("yes", "no, never")
    assert re.fullmatch("(ab)+c?", text("grammar", 'start: "ab"+ "c"?'))
    assert re.match(r"\s*\{\s*(\"|\})", text("json_object"))


def test_an_answer_is_the_same_however_it_is_computed(one_stage: Pipeline) -> None:
    """It has the same bits on two stages, on two tensor ranks, with drafts, in replicas, and beside others."""
    requests: list[tuple[str, dict[str, Any]]] = [
        (
            prompt,
            {
                "structured_output": form(schema), "seed": seed, "n": 2, "max_tokens": 60, "logprobs": 2,
                "temperature": seed % 2, "stop": ["green"], "repetition_penalty": 1.1,
            },
        )
        for seed, (prompt, schema) in enumerate(zip(["Once", "The miller"] * 3, SCHEMAS.values(), strict=False))
    ]  # fmt: skip
    requests.append(("Once", {"max_tokens": 40, "seed": 3, "logprobs": 1}))
    alone = [one_stage.complete(prompt, **options) for prompt, options in requests]
    settings: list[dict[str, Any]] = [{}, {"tensor_parallel": 2}, {"speculate": 4}, {"replicas": 2}]
    for each in settings:
        with tiny(2, **each) as pipeline:
            for answer, expected in zip(together(pipeline, requests), alone, strict=True):
                assert_same(answer, expected)


def test_what_is_refused_says_where(one_stage: Pipeline) -> None:
    def refusal(options: dict[str, Any]) -> str:
        with pytest.raises(InvalidRequest) as refused:
            one_stage.stream("Once", **options)
        return str(refused.value)

    nested = {"properties": {"a": {"not": {}}}}
    assert refusal({"structured_output": form(nested)}).startswith("structured_output: at /properties/a/not: ")
    assert refusal({"structured_output": StructuredOutput("json_object", "{}")}).startswith("structured_output: ")
    listed = {"structured_output": form({}), "ignore_eos": True, "min_tokens": 3}
    assert re.fullmatch("ignore_eos: .*; min_tokens: .*", refusal(listed))
    with pytest.raises(TypeError, match=r"structured_output: .*Invalid enum value"):
        one_stage.stream("Once", structured_output={"kind": "xml", "source": ""})  # type: ignore[typeddict-item]
