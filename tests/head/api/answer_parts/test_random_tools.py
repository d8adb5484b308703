"""Forced calls of random tools: drawn under masks they are valid, and streamed or resumed they say the same."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest

from ppserve.core.request import FinishReason
from ppserve.head.api.answer_parts.answer_format import AnswerPlan
from ppserve.head.api.answer_parts.formats import TOOL_FORMATS, FormatNames, answer_format
from ppserve.head.api.answer_parts.parts import Part, merged
from ppserve.head.api.answer_parts.tools import ToolChoice, Tooling
from tests.grammar.words import drawn
from tests.head.api.answer_parts.cases import CUT
from tests.head.api.answer_parts.random_tools import random_tools
from tests.head.api.answer_parts.test_forms import grammar_of
from tests.head.api.answer_parts.test_parsing import REQUEST, cut, streamed, understood
from tests.slow import thorough

FORMATS = [each.name for each in TOOL_FORMATS]


def resumed(plan: AnswerPlan, text: str, place: int, finish: FinishReason) -> list[Part]:
    """The parts of an answer that breaks off at a place, and those of the answer that is resumed there."""
    held = plan.parser(REQUEST, 0).parts(text[:place], None)
    return merged([*held, *plan.parser(REQUEST, 0, text[:place]).parts(text[place:], finish)])


@pytest.mark.parametrize("count", [4, *thorough(200)])
@pytest.mark.parametrize("name", FORMATS)
def test_calls_of_random_tools_are_valid_and_the_same_in_pieces_and_resumed(name: str, count: int) -> None:
    rng = random.Random(count)
    tools = random_tools(rng, count, name)
    schemas, num_valid = {tool.name: tool.schema for tool in tools}, 0
    for tool, other in zip(tools, [*tools[1:], tools[0]], strict=True):
        choice = ToolChoice("required", rng.choice([tool.name, None]))
        plan = answer_format("", {}, FormatNames(name)).plan(Tooling((tool, other), choice), "")
        answer = drawn(grammar_of(plan), rng)
        if answer is None:
            continue
        text, end = answer.decode(), FinishReason.EOS
        whole = plan.parser(REQUEST, 0).parts(text, end)
        places = [rng.randrange(len(text) + 1) for _ in range(6)]
        assert streamed(plan, [*cut(text, places)], end) == whole
        for place in places:
            assert resumed(plan, text, place, end) == whole
            begun = text[:place]
            assert streamed(plan, [*cut(begun, places)], CUT) == plan.parser(REQUEST, 0).parts(begun, CUT)
        for call in understood(whole, end).calls:
            assert call.has_ended
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])
            num_valid += 1
    assert num_valid >= count // 2
