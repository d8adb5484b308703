"""Calls that must be valid: the forms of all formats accept what their parsers read, and nothing else."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import AddedToken

from ppserve.core.request import OutputOptions, Request, StopConditions
from ppserve.errors import InvalidRequest
from ppserve.grammar.state import Grammar, GrammarFilter
from ppserve.grammar.structured_output import FormRefused, StructuredOutput
from ppserve.grammar.translating import translate
from ppserve.grammar.vocabulary import Vocabulary
from ppserve.head.api.answer_parts.answer_format import AnswerPlan
from ppserve.head.api.answer_parts.formats import FormatNames, answer_format
from ppserve.head.api.answer_parts.parts import AnswerText, CallArguments, CallBegin
from ppserve.head.api.answer_parts.tools import Tool, ToolChoice, Tooling
from ppserve.head.engine.streams import SequenceProgress
from ppserve.head.options import GenerationOptions
from tests.grammar.words import PADDING, allowed, drawn, fits, library
from tests.head.api.answer_parts.cases import BY_FORMAT, CUT
from tests.head.api.answer_parts.test_parsing import REQUEST, understood
from tests.tokenizer.made_up import loaded, made_up

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = Tool("f", parameters=SCHEMA), Tool("g")
STRICT = Tool("f", parameters=SCHEMA, strict=True), Tool("g")
REQUIRED = ToolChoice("required")

_CODER = "<tool_call>\n<function={}>\n{}</function>\n</tool_call>"
A = "<parameter=a>\n1\n</parameter>\n"
ONE = {
    "qwen3coder": _CODER.format("f", A),
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    "json": '{"name": "f", "arguments": {"a": 1}}',
    "llama3": '{"name": "f", "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]',
    "mistral11": '[TOOL_CALLS]f[ARGS]{"a": 1}',
    "channels": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}',
}
TWO = {
    "qwen3coder": ONE["qwen3coder"] + "\n" + _CODER.format("g", ""),
    "hermes": ONE["hermes"] + '\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    "json": ONE["json"] + '; {"name": "g", "arguments": {}}',
    "llama3": ONE["llama3"] + '; {"name": "g", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
    "mistral11": ONE["mistral11"] + "[TOOL_CALLS]g[ARGS]{}",
}
TEXT = dict.fromkeys(ONE, "Hello {there}") | {"channels": "<|channel|>final<|message|>Hello {there}"}


FINAL = dict.fromkeys(ONE, "") | {"channels": "<|channel|>final<|message|>"}
"""What stands in front of a text."""


def plan_of(
    name: str, tooling: Tooling, reasoning: str = "none", prompt: str = "", text: StructuredOutput | None = None
) -> AnswerPlan:
    return answer_format("", {}, FormatNames(name, reasoning)).plan(tooling, prompt, text)


def grammar_of(plan: AnswerPlan) -> Grammar:
    assert plan.form is not None
    return Grammar(translate(plan.form), library(), 0)


@pytest.mark.parametrize("name", ONE)
def test_a_call_that_is_required_is_a_valid_one(name: str) -> None:
    form = grammar_of(plan_of(name, Tooling(TOOLS, REQUIRED)))
    assert fits(form, ONE[name])
    assert fits(form, TWO.get(name, ONE[name]))
    one = ONE[name]
    other = (
        one.replace("functions.f", "functions.h").replace('"f"', '"h"').replace("]f[", "]h[").replace("=f>", "=h>")
    )
    values = (one.replace("1", "100"), one.replace("1", '"1"'), one.replace('"a"', '"b"').replace("=a>", "=b>"))
    for wrong in ("", TEXT[name], one[:-1], one + "x", other, *values):
        assert not fits(form, wrong), wrong


@pytest.mark.parametrize("name", ONE)
def test_the_tool_that_is_named_is_called_once(name: str) -> None:
    form = grammar_of(plan_of(name, Tooling(TOOLS, ToolChoice("required", "f"))))
    assert fits(form, ONE[name])
    assert not fits(form, TWO.get(name, ""))
    other = grammar_of(plan_of(name, Tooling(TOOLS, ToolChoice("required", "g"))))
    assert not fits(other, ONE[name])


@pytest.mark.parametrize("name", TWO)
def test_one_call_where_calls_may_not_be_parallel(name: str) -> None:
    form = grammar_of(plan_of(name, Tooling(TOOLS, REQUIRED, parallel=False)))
    assert fits(form, ONE[name])
    assert not fits(form, TWO[name])


@pytest.mark.parametrize("name", ONE)
@pytest.mark.parametrize("parallel", [True, False])
def test_a_strict_tool_may_be_called_and_then_rightly(name: str, parallel: bool) -> None:
    form = grammar_of(plan_of(name, Tooling(STRICT, parallel=parallel)))
    assert fits(form, TEXT[name])
    assert fits(form, ONE[name])
    assert fits(form, TWO.get(name, ONE[name])) == (parallel or name == "channels")
    assert not fits(form, ONE[name].replace("1", "100"))
    if name not in ("json", "llama3", "channels"):
        assert fits(form, "Let me see.\n" + ONE[name])
        assert not fits(form, "Let me see.\n" + ONE[name].replace("1", "x"))


@pytest.mark.parametrize("name", ONE)
def test_only_the_tools_that_are_allowed_are_called(name: str) -> None:
    f, g = (grammar_of(plan_of(name, Tooling(TOOLS, ToolChoice(allowed=(each,))))) for each in "fg")
    for form in (f, g):
        assert fits(form, TEXT[name])
        assert not fits(form, TWO.get(name, ONE[name].replace("f", "h")))
    assert fits(f, ONE[name])
    assert not fits(g, ONE[name])
    free = ONE[name].replace("1", "123")  # the tool is not strict
    assert fits(f, free)
    forced = grammar_of(plan_of(name, Tooling(TOOLS, ToolChoice("required", allowed=("f",)))))
    assert fits(forced, ONE[name])
    assert not any(fits(forced, wrong) for wrong in (TEXT[name], free, TWO.get(name, "")))
    assert plan_of(name, Tooling(TOOLS, ToolChoice(allowed=("g", "f")))).form is None


@pytest.mark.parametrize("name", ONE)
def test_a_tool_that_is_not_strict_beside_one_that_is_has_any_arguments(name: str) -> None:
    unclear: dict[str, Any] = {"properties": {"a": {"not": {}}, "l": {"type": ["array"], "items": {"not": {}}}}}
    for schema in (
        unclear,
        {},
        {"properties": 3, "required": 4},
        {"properties": {"a": {"type": [{}], "enum": 5}}},
    ):
        tools = Tool("f", parameters=schema), Tool("g", strict=True)
        plan = plan_of(name, Tooling(tools))
        form = grammar_of(plan)
        answer = ONE[name].replace("1", '[1, "x"]')
        assert fits(form, answer)
        _, arguments, *_ = plan.parser(REQUEST, 0).parts(answer, CUT)
        assert isinstance(arguments, CallArguments)
        # Tags say nothing of a value's type, so the text of an unknown parameter is a string.
        is_text = name == "qwen3coder" and not isinstance(schema.get("properties"), dict)
        assert json.loads(arguments.text) == {"a": '[1, "x"]' if is_text else [1, "x"]}
        if name == "qwen3coder":
            listed = _CODER.format("f", '<parameter=l>\n["</parameter>"]\n</parameter>\n')
            assert fits(form, listed) == (schema is unclear)


@pytest.mark.parametrize("name", ONE)
def test_without_strict_tools_an_answer_has_no_form(name: str) -> None:
    assert plan_of(name, Tooling(TOOLS)).form is None
    assert plan_of(name, Tooling(STRICT, ToolChoice("none"))).form is None
    assert plan_of(name, Tooling()).form is None


@pytest.mark.parametrize("name", ONE)
def test_what_is_drawn_is_read_back_as_valid_calls(name: str) -> None:
    rng = random.Random(7)
    plan = plan_of(name, Tooling(TOOLS, REQUIRED))
    form = grammar_of(plan)
    schemas = {tool.name: tool.schema for tool in TOOLS}
    num_read = 0
    for _ in range(15):
        answer = drawn(form, rng)
        if answer is None:
            continue
        found = understood(plan.parser(REQUEST, 0).parts(answer.decode(), CUT), CUT)
        if name == "channels":  # whose end is a token
            assert not found.calls[-1].has_ended
        assert found.calls
        assert not found.text
        for call in found.calls:
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])
        num_read += 1
    assert num_read > 5


OK = StructuredOutput("json_schema", '{"properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}')
SAID = ["yes", "<tool_call>{}</tool_call>", ["[TOOL_CALLS]g[ARGS]{}"]]
TEXTS = StructuredOutput("json_schema", json.dumps({"enum": SAID}))
MARKED = [name for name in ONE if name not in ("json", "llama3")]


@pytest.mark.parametrize("tools", [TOOLS, STRICT])
@pytest.mark.parametrize("name", MARKED)
def test_beside_a_form_an_answer_is_calls_or_a_text_of_the_form(name: str, tools: tuple[Tool, ...]) -> None:
    form = grammar_of(plan_of(name, Tooling(tools), text=OK))
    text = FINAL[name] + '{"ok": true}'
    for right in (ONE[name], TWO.get(name, text), text):
        assert fits(form, right), right
    falsely = FINAL[name] + '{"ok": 1}', ONE[name].replace("1", "x")
    for wrong in (TEXT[name], *falsely, text + ONE[name], ONE[name] + text):
        assert not fits(form, wrong), wrong
    assert plan_of(name, Tooling(tools, ToolChoice("none")), text=OK).form is None


@pytest.mark.parametrize("name", MARKED)
def test_what_is_drawn_beside_a_form_is_read_back_as_valid_calls_or_as_a_valid_text(name: str) -> None:
    rng, seen = random.Random(11), {"calls": 0, "text": 0}
    plan = plan_of(name, Tooling(TOOLS), text=TEXTS)
    form = grammar_of(plan)
    for _ in range(60):
        if (answer := drawn(form, rng)) is None:
            continue
        found = understood(plan.parser(REQUEST, 0).parts(answer.decode(), CUT), CUT)
        assert bool(found.calls) != bool(found.text), answer
        if found.text:
            assert json.loads(found.text) in SAID
        for call in found.calls:
            jsonschema.validate(json.loads(call.arguments), next(t.schema for t in TOOLS if t.name == call.name))
        seen["calls" if found.calls else "text"] += 1
    assert min(seen.values()) > 0


def test_what_is_thought_may_precede_a_text_of_a_form() -> None:
    thought = grammar_of(plan_of("hermes", Tooling(TOOLS), "think", text=OK))
    text, call = '{"ok": true}', ONE["hermes"]
    for answer in (text, f"<think>\n<tool_call></think>\n\n{text}", f"<think></think>{call}"):
        assert fits(thought, answer), answer


@pytest.mark.parametrize("name", ONE)
def test_a_form_beside_which_calls_could_not_be_told_is_refused(name: str) -> None:
    for kind, choice, problem in (
        ("json_object", REQUIRED, "tools that must be called"),
        ("regex", ToolChoice(), "tools: only JSON is"),
        ("json_object", ToolChoice(), "" if name in MARKED else f"in the format {name}, a call and other JSON"),
    ):  # fmt: skip
        text = StructuredOutput(kind, "" if kind == "json_object" else "a")
        if not problem:
            assert plan_of(name, Tooling(TOOLS, choice), text=text).form is not None
            continue
        with pytest.raises(InvalidRequest, match=f"structured_output: not together with .*{problem}"):
            plan_of(name, Tooling(TOOLS, choice), text=text)
    wrong = plan_of("hermes", Tooling(TOOLS), text=StructuredOutput("json_schema", '{"not": {}}'))
    with pytest.raises(FormRefused, match="at /not: the keyword 'not'"):
        grammar_of(wrong)


def test_what_is_thought_may_precede_a_call_that_is_required() -> None:
    tooling = Tooling(TOOLS, REQUIRED)
    call = ONE["hermes"]
    fresh = grammar_of(plan_of("hermes", tooling, "think"))
    assert all(fits(fresh, answer) for answer in (call, f"<think>\nHm <tool_call> {{\n</think>\n\n{call}"))
    assert not any(
        fits(fresh, answer) for answer in ("<think>Hm", f"Hm</think>{call}", f"<think>Hm</think>Well.{call}")
    )
    begun = grammar_of(plan_of("hermes", tooling, "think", "<|im_start|>assistant\n<think>\n"))
    assert fits(begun, f"Hm</think>{call}")
    assert not fits(begun, call)
    channels = grammar_of(plan_of("channels", tooling, "channels"))
    assert fits(channels, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" + ONE["channels"])


def test_a_special_token_is_drawn_as_such_and_not_spelled() -> None:
    """A vocabulary has them without bytes, so that no text is one."""
    form = answer_format("", {"[TOOL_CALLS]": PADDING}, FormatNames("mistral")).plan(Tooling(TOOLS, REQUIRED), "")
    assert form.shows_special
    rest = [*ONE["mistral"].removeprefix("[TOOL_CALLS]").encode()]
    drawn_by = GrammarFilter(grammar_of(form))
    assert drawn_by.accepts([], [PADDING, *rest]) == len(rest) + 1
    assert drawn_by.is_complete([PADDING, *rest])
    assert drawn_by.accepts([], [*ONE["mistral"].encode()]) == 0
    strict = answer_format("", {"[TOOL_CALLS]": PADDING}, FormatNames("mistral")).plan(Tooling(STRICT), "")
    drawn_by = GrammarFilter(grammar_of(strict))
    assert drawn_by.accepts([], [*b"Hi", PADDING, *rest]) == len(rest) + 3
    assert drawn_by.accepts([], [*b"Hi [TOOL_CALLS] "]) == 16
    assert drawn_by.accepts([], [*b"Hi", PADDING, *rest[:-3], ord("x")]) == len(rest)


def test_a_tokenizer_s_special_tokens_are_drawn_shown_and_read_back(tmp_path: Path) -> None:
    """An answer is drawn under the masks of its form, becomes text and then a valid call. Where its text
    is without the marker's name, there is none."""
    marker, end = AddedToken("[TOOL_CALLS]", special=True), AddedToken("<end>", special=True)
    tokenizer = loaded(made_up("bytes", marker, end), tmp_path)
    special_ids = tokenizer.special_ids
    plan = answer_format("", special_ids, FormatNames("mistral")).plan(
        Tooling(TOOLS, ToolChoice("required", "f")), ""
    )
    assert plan.form is not None
    options = plan.adjusted(GenerationOptions())
    assert (options.skip_special_tokens, options.structured_output) == (False, plan.form)
    vocabulary = Vocabulary.of(tokenizer.text_bytes, tokenizer.vocab_size, [special_ids["<end>"]])
    drawn_by = GrammarFilter(Grammar(translate(plan.form), vocabulary.for_library(), 0))
    rng, ids = random.Random(3), list[int]()
    assert allowed(drawn_by.allowed([])) == [special_ids["[TOOL_CALLS]"]]
    while special_ids["<end>"] not in (may := allowed(drawn_by.allowed(ids))):
        ids.append(rng.choice(may))
    for skips, num_calls in ((False, 1), (True, 0)):
        output = OutputOptions(skip_special_tokens=skips)
        progress = SequenceProgress(Request("r", (1,), StopConditions(999), output=output), tokenizer)
        text = "".join(progress.read(None, token_id)[2] for token_id in ids) + progress.end()
        calls = understood(plan.parser(REQUEST, 0).parts(text, CUT), CUT).calls
        assert len(calls) == num_calls
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMA)


def test_tags_have_values_of_each_kind_and_refuse_what_they_cannot_force() -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "e": {"enum": ["red", "1"]},
            "l": {"type": "array", "items": {"enum": ["</parameter>", 2]}, "maxItems": 2},
            "n": {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
        },
        "required": ["e", "l"],
    }
    plan, rng, num_read = (
        plan_of("qwen3coder", Tooling((Tool("f", parameters=schema),), REQUIRED)),
        random.Random(5),
        0,
    )
    form = grammar_of(plan)
    for _ in range(30):
        if (answer := drawn(form, rng)) is None:
            continue
        for call in understood(plan.parser(REQUEST, 0).parts(answer.decode(errors="replace"), CUT), CUT).calls:
            jsonschema.validate(json.loads(call.arguments), schema)
            num_read += 1
    assert num_read > 5
    text: dict[str, Any] = {"properties": {"t": {"type": "string", "title": "Any text"}}, "required": ["t"]}
    texts = grammar_of(plan_of("qwen3coder", Tooling((Tool("f", parameters=text),), REQUIRED)))
    assert fits(texts, _CODER.format("f", '<parameter=t>\nif "a" < b:\n\n</parameter>\n'))
    assert not fits(texts, _CODER.format("f", "<parameter=t>a</parameter></parameter>\n"))
    assert not fits(texts, _CODER.format("f", ""))
    wrong: tuple[dict[str, Any], ...] = (
        {"properties": {"a": {"type": "string", "maxLength": 3}}}, {"properties": {"a": {"anyOf": [{}]}}},
        {"properties": {"a": {"type": ["string", "null"]}}}, {"minProperties": 1}, {"required": ["a"]},
        {"properties": {"a": {"enum": ["a", 1]}}}, {"properties": {"a": True}}, {"properties": {"a": 5}},
        {"properties": {"a": {"type": [{}]}}}, {"properties": {"a": {"enum": 5}}},
        {"properties": ["a"]}, {"properties": {"a": {"type": 5}}}, {"required": 5}, {"required": [["a"]]},
        {"properties": {"a>": {"type": "null"}}},
    )  # fmt: skip
    for each in wrong:
        problem = r"tools: .(a|a>|\['a'\]|minProperties|properties|required). in the parameters of 'f' cannot"
        with pytest.raises(InvalidRequest, match=problem):
            plan_of("qwen3coder", Tooling((Tool("f", parameters=each),), REQUIRED))
        assert plan_of("qwen3coder", Tooling((Tool("f", parameters=each),))).form is None


@pytest.mark.parametrize("name", sorted(ONE.keys() - {"qwen3coder"}))  # whose tags make an object of anything
def test_arguments_are_an_object_whatever_else_they_may_be(name: str) -> None:
    either = {**SCHEMA, "type": ["object", "null"]}
    form = grammar_of(plan_of(name, Tooling((Tool("f", parameters=either),), REQUIRED)))
    assert fits(form, ONE[name])
    assert not fits(form, ONE[name].replace('{"a": 1}', "null"))


def test_names_of_tools_that_begin_alike_are_told_apart() -> None:
    tools = Tool("get"), Tool("get_all"), Tool("get.x")
    for name in ONE:
        plan = plan_of(name, Tooling(tools, REQUIRED))
        form = grammar_of(plan)
        for tool in tools:
            answer = ONE[name].replace('"f"', f'"{tool.name}"').replace("]f[", f"]{tool.name}[")
            answer = answer.replace("functions.f", f"functions.{tool.name}").replace('{"a": 1}', "{}")
            answer = answer.replace("=f>", f"={tool.name}>").replace(A, "")
            assert fits(form, answer), answer
            begun = [
                part.name for part in plan.parser(REQUEST, 0).parts(answer, CUT) if isinstance(part, CallBegin)
            ]
            assert begun == [tool.name]


def test_a_schema_that_is_not_enforced_is_refused_with_its_tool() -> None:
    plan = plan_of(
        "hermes", Tooling((Tool("g"), Tool("f", parameters={"properties": {"a": {"not": {}}}})), REQUIRED)
    )
    with pytest.raises(FormRefused, match="at /properties/a/not: the parameters of 'f': the keyword 'not'"):
        grammar_of(plan)


def test_a_format_that_is_not_known_is_refused_unless_the_call_is_required() -> None:
    unknown = answer_format("{{ messages }}", {})
    with pytest.raises(InvalidRequest, match=r"tools: .*--tool-format"):
        unknown.plan(Tooling(TOOLS), "")
    forced = unknown.plan(Tooling(TOOLS, REQUIRED), "")
    assert fits(grammar_of(forced), ONE["json"])
    assert isinstance(forced.parser(REQUEST, 0).parts(ONE["json"], CUT)[1], CallArguments)
    assert unknown.plan(Tooling(TOOLS, ToolChoice("none")), "").parser(REQUEST, 0).parts(ONE["json"], CUT) == [
        AnswerText(ONE["json"])
    ]


SHOWN = {
    "qwen3coder": """{{ '<tool_call>\\n<function=' + call.name + '>\\n' }}{{ '<parameter=' + key + '>\\n' }}""",
    "hermes": """{{ '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}""",
    "llama3": """{{ 'ipython' }}{{ '{"name": "' + call.name + '", ' }}{{ '"parameters": ' }}""",
    "mistral": "{{ '[TOOL_CALLS] [' }}",
    "mistral11": "{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}",
    "channels": "{{ '<|start|>assistant<|channel|>final<|message|>' }}",
    None: "{{ '<tool_call>\\n<function=' + call.name + '>' }}",
}


def test_a_template_shows_its_format() -> None:
    for name, template in SHOWN.items():
        found = answer_format(template, {})
        assert (found.tools.name if found.tools else None) == name
        assert (found.reasoning.name if found.reasoning else None) == ("channels" if name == "channels" else None)
        assert answer_format(template, {}, FormatNames("none", "none")).tools is None
        assert answer_format(template, {}, FormatNames("mistral", "think")).reasoning is not None
    assert answer_format("{{ content.split('</think>') }}", {}).reasoning is not None
    assert BY_FORMAT.keys() == {*SHOWN, "json"} - {None}
