"""Answers become parts: the tables of all formats, whole and in any pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppserve.core.request import FinishReason, Request, StopConditions
from ppserve.head.api.answer_parts.answer_format import STOPS, AnswerPlan
from ppserve.head.api.answer_parts.formats import TOOL_FORMATS, FormatNames, answer_format
from ppserve.head.api.answer_parts.parts import (
    AnswerText,
    CallArguments,
    CallBegin,
    CallEnd,
    Part,
    Reasoning,
    merged,
)
from ppserve.head.api.answer_parts.tools import Tool, Tooling
from tests.head.api.answer_parts.cases import BY_FORMAT, CUT, THINK, THINK_BEGUN, Called, Case

TYPES = {"a": "integer", "t": "string", "l": "array", "n": ["integer", "null"], "b": "boolean"}
PARAMETERS = {"properties": {"e": {"enum": ["1", "2"]}, **{name: {"type": each} for name, each in TYPES.items()}}}
TOOLING = Tooling((Tool("f", parameters=PARAMETERS), Tool("g")))
REQUEST = Request("r", (1, 2), StopConditions(9))


def plan_of(tools: str, reasoning: str = "none", prompt: str = "", tooling: Tooling = TOOLING) -> AnswerPlan:
    return answer_format("", {}, FormatNames(tools, reasoning)).plan(tooling, prompt)


PLANS = {
    **{(name, ""): plan_of(name) for name in BY_FORMAT},
    ("hermes", "think"): plan_of("hermes", "think"),
    ("hermes", "begun"): plan_of("hermes", "think", "assistant\n<think>\n"),
}
CASES = [
    *((name, "", title, case) for name, table in BY_FORMAT.items() for title, case in table.items()),
    *(("hermes", "think", title, case) for title, case in THINK.items()),
    *(("hermes", "begun", title, case) for title, case in THINK_BEGUN.items()),
]
each_case = pytest.mark.parametrize(
    ("plan", "case"),
    [
        pytest.param(PLANS[tools, reasoning], case, id=f"{tools}{reasoning}: {t}")
        for tools, reasoning, t, case in CASES
    ],
)


def streamed(plan: AnswerPlan, pieces: Sequence[str], finish: FinishReason) -> list[Part]:
    """The parts of an answer that comes in these pieces, of which an empty last one ends it."""
    parser = plan.parser(REQUEST, 0)
    return merged([part for piece in pieces for part in parser.parts(piece, None)] + parser.parts("", finish))


def cut(text: str, places: Sequence[int]) -> Iterator[str]:
    ends = [*sorted(place % (len(text) + 1) for place in places), len(text)]
    for begin, end in zip([0, *ends], ends, strict=False):
        yield text[begin:end]


def understood(parts: Sequence[Part], finish: FinishReason) -> Case:
    """What the parts say. Their order is checked."""
    calls: list[Called] = []
    for part in parts:
        match part:
            case CallBegin(index=index, name=name):
                assert index == len(calls)
                calls.append(Called(name, "", False))
            case CallArguments(index=index, text=text):
                assert index == len(calls) - 1
                assert not calls[-1].has_ended
                calls[-1] = calls[-1]._replace(arguments=calls[-1].arguments + text)
            case CallEnd(index=index):
                assert index == len(calls) - 1
                calls[-1] = calls[-1]._replace(has_ended=True)
    text = "".join(part.text for part in parts if isinstance(part, AnswerText))
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    return Case("", text, tuple(calls), reasoning, finish)


@each_case
def test_an_answer_means_its_case(plan: AnswerPlan, case: Case) -> None:
    found = understood(plan.parser(REQUEST, 0).parts(case.answer, case.finish), case.finish)
    assert found == Case("", case.text, case.calls, case.reasoning, case.finish)


@each_case
def test_an_answer_in_pieces_is_the_whole_one(plan: AnswerPlan, case: Case) -> None:
    """A character at a time, and cut once anywhere."""
    text, finish = case.answer, case.finish
    whole = plan.parser(REQUEST, 0).parts(text, finish)
    assert streamed(plan, text, finish) == whole
    for place in range(len(text) + 1):
        assert streamed(plan, [text[:place], text[place:]], finish) == whole


@pytest.mark.parametrize("finish", FinishReason)
@pytest.mark.parametrize("name", BY_FORMAT)
def test_an_answer_that_is_stopped_within_a_call_ends_with_none(name: str, finish: FinishReason) -> None:
    """Clients read the arguments of an answer whose end says that tools are called."""
    cases = BY_FORMAT[name].values()
    answer = next(case.answer for case in cases if len(case.calls) == 1 and case.calls[0].arguments == '{"a": 1}')
    ends_with_token = name == "channels"  # which has no text
    begun = [answer[:place] for place in range(1, answer.index("1"))]
    for text, is_whole in ((answer, not ends_with_token), *((each, False) for each in begun)):
        parser = PLANS[name, ""].parser(REQUEST, 0)
        parts = parser.parts(text, None)
        may_call = parser.has_called
        parts += parser.parts("", finish)
        stopped = finish in STOPS[: 1 if ends_with_token else 2]
        assert parser.has_called == (may_call and (is_whole or not stopped))
        if not is_whole and not ends_with_token:
            assert not any(isinstance(part, CallEnd) for part in parts), text
    assert may_call


@pytest.mark.parametrize("finish", STOPS)
def test_a_stop_within_a_call_that_is_left_out_does_not_concern_those_before_it(finish: FinishReason) -> None:
    parser = plan_of("hermes", tooling=Tooling(TOOLING.tools, parallel=False)).parser(REQUEST, 0)
    whole = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    parts = parser.parts(whole + "\n" + whole[:-16], None) + parser.parts("", finish)
    assert [type(part) for part in parts if isinstance(part, CallBegin | CallEnd)] == [CallBegin, CallEnd]
    assert parser.has_called


FRAGMENTS = st.sampled_from(
    [
        *("<function=f>", "<parameter=t>", "<parameter=l>", "</parameter>", "</function>"),
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", "<|python_tag|>"),
        *("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>", "analysis", "to=functions.f"),
        *(
            '{"name": "f", ',
            '"arguments": ',
            '{"a": 1}',
            "{",
            "}",
            "[",
            "]",
            '"',
            "\\",
            ",",
            ":",
            ";",
            "<",
            "\n",
            " ",
        ),
        *("null", "12", "f", "ä", "name", "tool_call>"),
    ]
)


@settings(max_examples=300, deadline=None)
@given(
    answer=st.lists(FRAGMENTS, max_size=20).map("".join),
    places=st.lists(st.integers(0, 400), max_size=6),
    which=st.sampled_from(sorted(PLANS)),
    finish=st.sampled_from([FinishReason.EOS, CUT]),
)
def test_any_text_in_any_pieces_is_the_whole_one(
    answer: str, places: list[int], which: tuple[str, str], finish: FinishReason
) -> None:
    whole = PLANS[which].parser(REQUEST, 0).parts(answer, finish)
    assert streamed(PLANS[which], [*cut(answer, places)], finish) == whole
    assert streamed(PLANS[which], answer, finish) == whole
    understood(whole, finish)
    assert all(part.text for part in whole if not isinstance(part, CallBegin | CallEnd))


@pytest.mark.parametrize("name", BY_FORMAT)
def test_without_tools_an_answer_is_text(name: str) -> None:
    """One that looks like a call is text, too, and so it is with tools that may not be called."""
    for tooling in (Tooling(), Tooling(TOOLING.tools, choice=none())):
        plan = plan_of(name, tooling=tooling)
        for case in BY_FORMAT[name].values():
            assert plan.parser(REQUEST, 0).parts(case.answer, case.finish) == (
                [AnswerText(case.answer)] if case.answer else []
            )


def none() -> object:
    from ppserve.head.api.answer_parts.tools import ToolChoice

    return ToolChoice("none")


def test_an_answer_is_resumed_anywhere() -> None:
    """The parts behind any place are those that the caller does not hold, with the same ids."""
    for plan, case in (
        (PLANS["hermes", "think"], THINK["a thought and a call"]),
        (PLANS["mistral", ""], BY_FORMAT["mistral"]["two of version 11"]),
    ):
        whole = plan.parser(REQUEST, 1).parts(case.answer, case.finish)
        for place in range(len(case.answer)):
            held = plan.parser(REQUEST, 1).parts(case.answer[:place], None)
            rest = plan.parser(REQUEST, 1, case.answer[:place]).parts(case.answer[place:], case.finish)
            assert merged(held + rest) == whole


def test_ids_differ_between_calls_answers_and_chats() -> None:
    answer = BY_FORMAT["hermes"]["two calls"].answer
    plan = PLANS["hermes", ""]

    def ids(prompt: tuple[int, ...], index: int) -> list[str]:
        request = Request("r", prompt, StopConditions(9))
        return [part.id for part in plan.parser(request, index).parts(answer, CUT) if isinstance(part, CallBegin)]

    found = [each for prompt in ((1,), (2,)) for index in (0, 1) for each in ids(prompt, index)]
    assert len({*found}) == len(found) == 8
    assert all(len(each) == 9 and each.isalnum() for each in found)
    assert ids((1,), 0) == ids((1,), 0)


def test_further_calls_are_left_out_where_one_is_asked_for() -> None:
    plan = plan_of("hermes", tooling=Tooling(TOOLING.tools, parallel=False))
    case = BY_FORMAT["hermes"]["two calls"]
    assert understood(streamed(plan, case.answer, case.finish), CUT).calls == case.calls[:1]


def test_every_format_has_a_table() -> None:
    assert {each.name for each in TOOL_FORMATS} == BY_FORMAT.keys()
    assert all(len(table) >= 18 for table in BY_FORMAT.values())
