"""Answers as models write them, and what they mean: a table for each format. All are read whole and in pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ppserve.core.request import FinishReason


class Called(NamedTuple):
    name: str
    arguments: str
    has_ended: bool = True


@dataclass(frozen=True)
class Case:
    answer: str
    text: str = ""
    calls: tuple[Called, ...] = ()
    reasoning: str = ""
    finish: FinishReason = FinishReason.EOS


CUT = FinishReason.MAX_TOKENS
F = Called("f", '{"a": 1}')
G = Called("g", "{}")
NO_CALL = '{"a": [1, {"name": "f"}]}'

HERMES = {
    "text alone": Case("Hello,\n world \n", "Hello,\n world \n"),
    "one call": Case('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', calls=(F,)),
    "no blanks": Case('<tool_call>{"name":"f","arguments":{"a": 1}}</tool_call>', calls=(F,)),
    "text before and behind": Case(
        'Let me see.\n\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n\nDone. ',
        "Let me see.Done. ", (F,),
    ),
    "two calls": Case(
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>\n',
        calls=(F, G),
    ),
    "two calls in one list": Case(
        '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]</tool_call>',
        calls=(F, G),
    ),
    "arguments before the name": Case(
        '<tool_call>{"arguments": {"name": "x", "b": "}"}, "name": "f"}</tool_call>',
        calls=(Called("f", '{"name": "x", "b": "}"}'),),
    ),
    "markers and brackets in strings": Case(
        r'<tool_call>{"name": "f", "arguments": {"a": "</tool_call>{\"[\\", "b": [{"c": "\\"}]}}</tool_call>x',
        "x", (Called("f", r'{"a": "</tool_call>{\"[\\", "b": [{"c": "\\"}]}'),),
    ),
    "deep arguments": Case(
        '<tool_call>{"name": "f", "arguments": {"a": {"b": {"c": [[[{}]]]}}}}</tool_call>',
        calls=(Called("f", '{"a": {"b": {"c": [[[{}]]]}}}'),),
    ),
    "arguments as a text of JSON": Case(
        r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>', calls=(F,)
    ),
    "arguments as another text": Case(
        '<tool_call>{"name": "f", "arguments": "hello"}</tool_call>', calls=(Called("f", '"hello"'),)
    ),
    "no arguments": Case('<tool_call>{"name": "g"}</tool_call>', calls=(G,)),
    "arguments that are null": Case('<tool_call>{"name": "g", "arguments": null}</tool_call>', calls=(G,)),
    "arguments that are missing": Case('<tool_call>{"name": "g", "arguments": }</tool_call>', calls=(G,)),
    "a type and an id": Case(
        '<tool_call>{"id": "x", "type": "function", "name": "g", "arguments": {}, "more": [1]}</tool_call>',
        calls=(G,),
    ),
    "a name with escapes": Case(
        r'<tool_call>{"name": "\u0067", "arguments": {}}</tool_call>', calls=(G,)
    ),
    "characters of several bytes": Case(
        '<tool_call>{"name": "f", "arguments": {"ä": "🐈\u2028"}}</tool_call>é',
        "é", (Called("f", '{"ä": "🐈\u2028"}'),),
    ),
    "a tool that is not offered": Case(
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>', calls=(Called("other", "{}"),)
    ),
    "no end marker": Case('<tool_call>\n{"name": "f", "arguments": {"a": 1}}', calls=(F,)),
    "no end marker between calls": Case(
        '<tool_call>{"name": "f", "arguments": {"a": 1}}\n<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        calls=(F, G),
    ),
    "a bracket too many": Case(
        '<tool_call>{"name": "f", "arguments": {"a": 1}}}\n</tool_call> ok', "ok", (F,)
    ),
    "a bracket is missing": Case(
        '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call> ok', "ok", (F,)
    ),
    "two brackets are missing": Case(
        '<tool_call>{"name": "f", "arguments": {"a": 1\n</tool_call>ok', "ok", (Called("f", '{"a": 1\n'),)
    ),
    "the marker as a word": Case("Write <tool_call> first.", "Write <tool_call> first."),
    "the marker at the end": Case("It ends with \n<tool_call>\n", "It ends with \n<tool_call>\n"),
    "half of a marker": Case("a <tool_cal", "a <tool_cal"),
    "half of a marker in the text": Case("a <tool_cal b <", "a <tool_cal b <"),
    "the marker twice": Case(
        '<tool_call> <tool_call>{"name": "g", "arguments": {}}</tool_call>', "<tool_call> ", (G,)
    ),
    "another object": Case(f"<tool_call>{NO_CALL}</tool_call>", f"<tool_call>{NO_CALL}</tool_call>"),
    "an empty object": Case("<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>"),
    "an empty list": Case("<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>"),
    "no JSON": Case("<tool_call>{name: f}</tool_call>", "<tool_call>{name: f}</tool_call>"),
    "a name that is no string": Case('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>'),
    "cut in the marker": Case("a\n<tool", "a\n<tool", finish=CUT),
    "cut in the name": Case('a\n<tool_call>{"name": "f', 'a\n<tool_call>{"name": "f', finish=CUT),
    "cut behind the name": Case('<tool_call>{"name": "f",', calls=(Called("f", "", False),), finish=CUT),
    "cut in the arguments": Case(
        '<tool_call>{"name": "f", "arguments": {"a": "<', calls=(Called("f", '{"a": "<', False),), finish=CUT
    ),
    "cut behind the arguments": Case(
        '<tool_call>{"name": "f", "arguments": {"a": 1}', calls=(Called("f", '{"a": 1}', False),), finish=CUT
    ),
    "cut in the end marker": Case(
        '<tool_call>{"name": "f", "arguments": {"a": 1}}\n</tool', calls=(F,), finish=CUT
    ),
    "ended in the arguments": Case(
        '<tool_call>{"name": "f", "arguments": {"a', calls=(Called("f", '{"a', False),)
    ),
}  # fmt: skip

BARE = {
    "text alone": Case(" Hello {there}", " Hello {there}"),
    "one call": Case('{"name": "f", "arguments": {"a": 1}}', calls=(F,)),
    "blanks around": Case('\n {"name": "f", "arguments": {"a": 1}}\n', calls=(F,)),
    "parameters": Case('{"name": "f", "parameters": {"a": 1}}', calls=(F,)),
    "two calls": Case('{"name": "f", "arguments": {"a": 1}}; {"name": "g", "arguments": {}}', calls=(F, G)),
    "two calls, a line each": Case('{"name": "f", "arguments": {"a": 1}}\n{"name": "g"}', calls=(F, G)),
    "a list": Case('[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', calls=(F, G)),
    "text behind": Case('{"name": "f", "arguments": {"a": 1}} I used {f}.', "I used {f}.", (F,)),
    "text behind a semicolon": Case('{"name": "f", "arguments": {"a": 1}}; so', "; so", (F,)),
    "JSON behind": Case('{"name": "f", "arguments": {"a": 1}}{"b": 1}', '{"b": 1}', (F,)),
    "a tool that is not offered": Case('{"name": "x", "arguments": {}}', '{"name": "x", "arguments": {}}'),
    "another object": Case(NO_CALL, NO_CALL),
    "another list": Case('[1, {"name": "f"}]', '[1, {"name": "f"}]'),
    "JSON within a text": Case('So: {"name": "f", "arguments": {}}', 'So: {"name": "f", "arguments": {}}'),
    "an empty answer": Case("", ""),
    "blanks alone": Case(" \n", " \n"),
    "cut in the name": Case('{"name": "f', '{"name": "f', finish=CUT),
    "cut in the arguments": Case(
        '{"name": "f", "arguments": {"a": [', calls=(Called("f", '{"a": [', False),), finish=CUT
    ),
    "cut between calls": Case('{"name": "g", "arguments": {}}; {"na', '; {"na', (G,), finish=CUT),
}

LLAMA3 = {
    **BARE,
    "its token": Case('<|python_tag|>{"name": "f", "parameters": {"a": 1}}', calls=(F,)),
    "its token before a text": Case("<|python_tag|>print(1)", "<|python_tag|>print(1)"),
    "half of its token": Case("<|pyt", "<|pyt"),
}

MISTRAL = {
    "text alone": Case("Hello [TOOL] ", "Hello [TOOL] "),
    "one call": Case('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', calls=(F,)),
    "no blanks": Case('[TOOL_CALLS][{"name":"f","arguments":{"a": 1}}]', calls=(F,)),
    "two calls": Case('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]', calls=(F, G)),
    "text before": Case('Hello [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', "Hello", (F,)),
    "text behind": Case('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]\nmore', "more", (F,)),
    "the marker twice": Case('[TOOL_CALLS] [{"name": "g"}][TOOL_CALLS] [{"name": "g"}]', calls=(G, G)),
    "arguments with a name": Case(
        '[TOOL_CALLS] [{"arguments": {"name": "x"}, "name": "f"}]', calls=(Called("f", '{"name": "x"}'),)
    ),
    "a list in a string": Case(
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "]}[TOOL_CALLS]"}}]',
        calls=(Called("f", '{"a": "]}[TOOL_CALLS]"}'),),
    ),
    "names of version 11": Case('[TOOL_CALLS]f[ARGS]{"a": 1}', calls=(F,)),
    "no marker for arguments": Case('[TOOL_CALLS]f{"a": 1}', calls=(F,)),
    "an id of its own": Case('[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}', calls=(F,)),
    "two of version 11": Case('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', calls=(F, G)),
    "broken arguments": Case('[TOOL_CALLS]f[ARGS]{"a": <b>}', "<b>}", (Called("f", '{"a": '),)),
    "no call": Case("[TOOL_CALLS] not JSON", "[TOOL_CALLS] not JSON"),
    "an empty list": Case("[TOOL_CALLS] []", "[TOOL_CALLS] []"),
    "cut in the name": Case("a [TOOL_CALLS]ge", "a [TOOL_CALLS]ge", finish=CUT),
    "cut in the arguments": Case('[TOOL_CALLS]f[ARGS]{"a"', calls=(Called("f", '{"a"', False),), finish=CUT),
    "cut in a list": Case('[TOOL_CALLS] [{"name": "g"}, {"na', ', {"na', (G,), finish=CUT),
}

_CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
_THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CHANNELS = {
    "the final channel": Case("<|channel|>final<|message|>Hello", "Hello"),
    "its end shown": Case("<|channel|>final<|message|>Hello<|return|>", "Hello"),
    "no channels": Case("Hello <there>", "Hello <there>"),
    "thought before": Case(f"{_THOUGHT}<|channel|>final<|message|>Hello", "Hello", reasoning="Hm."),
    "one call": Case(_CALL + '{"a": 1}', calls=(F,)),
    "one call, its end shown": Case(_CALL + '{"a": 1}<|call|>', calls=(F,)),
    "thought and call": Case(f'{_THOUGHT}{_CALL}{{"a": 1}}<|call|>', calls=(F,), reasoning="Hm."),
    "two thoughts": Case(f"{_THOUGHT}{_THOUGHT}{_CALL}{{}}", calls=(Called("f", "{}"),), reasoning="Hm.Hm."),
    "a preamble": Case(
        f'<|channel|>commentary<|message|>I look. <|end|><|start|>assistant{_CALL}{{"a": 1}}', "I look.", (F,)
    ),
    "the recipient in front": Case(' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', calls=(F,)),
    "the recipient's role in front": Case(
        f'{_THOUGHT} to=functions.f<|channel|>commentary<|message|>{{"a": 1}}', calls=(F,), reasoning="Hm."
    ),
    "no arguments": Case(_CALL, calls=(Called("f", "{}"),)),
    "no arguments, its end shown": Case(_CALL + "<|call|>", calls=(Called("f", "{}"),)),
    "another recipient": Case(
        "<|channel|>commentary to=browser.open<|message|>x", calls=(Called("browser.open", "x"),)
    ),
    "no end between messages": Case(
        '<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Hello', "Hello", reasoning="Hm."
    ),
    "text before a message": Case("Well.<|end|><|start|>assistant<|channel|>final<|message|>a", "Well.a"),
    "cut in a thought": Case("<|channel|>analysis<|message|>Hm ", reasoning="Hm ", finish=CUT),
    "cut in a header": Case("<|channel|>analysis", finish=CUT),
    "cut in the arguments": Case(_CALL + '{"a": 1}', calls=(Called("f", '{"a": 1}', False),), finish=CUT),
}  # fmt: skip

THINK = {
    "text alone": Case("\nHello", "\nHello"),
    "thought and text": Case("<think>\nHm.\n</think>\n\nHello", "Hello", reasoning="Hm."),
    "an empty thought": Case("<think>\n\n</think>\n\nHello", "Hello"),
    "a marker in a thought": Case(
        "<think>a <tool_call> b</think>c", "c", reasoning="a <tool_call> b"
    ),
    "a thought and a call": Case(
        '<think>Hm.</think>\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        calls=(F,), reasoning="Hm.",
    ),
    "a later tag": Case("a <think>b</think>", "a <think>b</think>"),
    "half of a tag": Case("<thin", "<thin"),
    "blanks alone": Case(" \n", " \n"),
    "cut in a thought": Case("<think>Hm, ", reasoning="Hm, ", finish=CUT),
    "cut in the end of a thought": Case("<think>Hm</thi", reasoning="Hm</thi", finish=CUT),
}  # fmt: skip

THINK_BEGUN = {
    "thought and text": Case("\nHm.\n</think>\n\nHello", "Hello", reasoning="Hm."),
    "no thought": Case("</think>Hello", "Hello"),
    "cut in a thought": Case("Hm", reasoning="Hm", finish=CUT),
}

_CODER = "<tool_call>\n<function={}>\n{}</function>\n</tool_call>"
_A = "<parameter=a>\n1\n</parameter>\n"
QWEN_CODER = {
    "text alone": Case("Hello,\n world \n", "Hello,\n world \n"),
    "one call": Case(_CODER.format("f", _A), calls=(F,)),
    "no blanks": Case("<tool_call><function=f><parameter=a>1</parameter></function></tool_call>", calls=(F,)),
    "no arguments": Case(_CODER.format("g", ""), calls=(G,)),
    "text before and behind": Case("I see.\n" + _CODER.format("f", _A) + "\nDone.", "I see.Done.", (F,)),
    "two calls": Case(_CODER.format("f", _A) + "\n" + _CODER.format("g", ""), calls=(F, G)),
    "a text of several lines": Case(
        _CODER.format("f", '<parameter=t>\n\nif "a" < b:\n  é\n\n</parameter>\n'),
        calls=(Called("f", '{"t": "\\nif \\"a\\" < b:\\n  é\\n"}'),),
    ),
    "a text that looks like a number": Case(
        _CODER.format("f", "<parameter=t>\n007\n</parameter>\n" + _A), calls=(Called("f", '{"t": "007", "a": 1}'),)
    ),
    "a list with the end's mark in it": Case(
        _CODER.format("f", '<parameter=l>\n["</parameter>", 1]\n</parameter>\n'),
        calls=(Called("f", '{"l": ["</parameter>", 1]}'),),
    ),
    "one of several texts": Case(
        _CODER.format("f", "<parameter=e>\n1\n</parameter>\n"), calls=(Called("f", '{"e": "1"}'),)
    ),
    "Python's words": Case(
        _CODER.format("f", "<parameter=n>\nNone\n</parameter>\n<parameter=b>True</parameter>"),
        calls=(Called("f", '{"n": null, "b": true}'),),
    ),
    "a number beyond all": Case(
        _CODER.format("f", "<parameter=a> 1e999</parameter>"), calls=(Called("f", '{"a": 1e999}'),)
    ),
    "no number": Case(_CODER.format("f", "<parameter=a>NaN</parameter>"), calls=(Called("f", '{"a": "NaN"}'),)),
    "a number that is none": Case(
        _CODER.format("f", "<parameter=a>one</parameter>"), calls=(Called("f", '{"a": "one"}'),)
    ),
    "a parameter that is not known": Case(
        _CODER.format("f", "<parameter=x>1</parameter>"), calls=(Called("f", '{"x": "1"}'),)
    ),
    "a tool that is not offered": Case(
        _CODER.format("h", "<parameter=x>1</parameter>"), calls=(Called("h", '{"x": "1"}'),)
    ),
    "junk behind a parameter": Case(_CODER.format("f", _A + "so"), calls=(F,)),
    "the marker as a word": Case("Write <tool_call> first.", "Write <tool_call> first."),
    "no name": Case("<tool_call><function=></tool_call>", "<tool_call><function=></tool_call>"),
    "a list that is none": Case(
        _CODER.format("f", _A + "<parameter=l>[1, <b>]</parameter>") + "so", "so", (F,)
    ),
    "JSON": Case('<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>'),
    "cut in the name": Case("a <tool_call>\n<function=f", "a <tool_call>\n<function=f", finish=CUT),
    "cut in a value": Case(
        "<tool_call><function=f>" + _A + "<parameter=t>Hel", calls=(Called("f", '{"a": 1', False),), finish=CUT
    ),
    "cut in the end marker": Case("<tool_call><function=f>" + _A + "</function></tool", calls=(F,), finish=CUT),
}  # fmt: skip

BY_FORMAT = {
    "hermes": HERMES,
    "qwen3coder": QWEN_CODER,
    "json": BARE,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "mistral11": MISTRAL,
    "channels": CHANNELS,
}
