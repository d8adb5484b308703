"""Forms are tried in a process with limits, and kept."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from contextlib import nullcontext

import psutil
import pytest

from ppserve.grammar import compiling_process
from ppserve.grammar.grammars import Grammars
from ppserve.grammar.structured_output import MAX_SOURCE_BYTES, FormRefused, StructuredOutput
from ppserve.process.limited import OutOfMemory, OutOfTime
from tests.grammar.words import BYTES, fits

GARBAGE_BYTES = 64 << 20


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(lambda: BYTES, max_entries=2, max_bytes=100)
    yield made
    made.close()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library has no malloc_trim")
@pytest.mark.parametrize(("source", "is_refused"), [("(?=a)", True), ("c", False)])
def test_memory_returns_once_a_form_is_refused_or_kept_no_more(
    grammars: Grammars, source: str, is_refused: bool
) -> None:
    """The control: freed memory stays with the process while something behind it is held."""
    for text in "ab":
        grammars.compile(StructuredOutput("regex", text))
    process = psutil.Process()
    garbage = [bytes(2_000) for _ in range(GARBAGE_BYTES // 2_000)]
    held = bytes(2_000)
    filled = process.memory_info().rss
    del garbage
    assert filled - process.memory_info().rss < GARBAGE_BYTES // 4
    with pytest.raises(FormRefused) if is_refused else nullcontext():
        grammars.compile(StructuredOutput("regex", source))
    assert filled - process.memory_info().rss > GARBAGE_BYTES // 2
    assert held


async def test_a_form_is_compiled_once(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    form = StructuredOutput("regex", "a|b")
    grammar = await grammars.compiled(form)
    assert fits(grammar, "b")
    monkeypatch.setattr(grammars, "_begun", lambda: pytest.fail("it is compiled twice"))
    assert await grammars.compiled(StructuredOutput("regex", "a|b")) is grammar
    assert grammars.compile(form) is grammar


def test_forms_are_kept_up_to_their_number_and_bytes(grammars: Grammars) -> None:
    first, second, third = (grammars.compile(StructuredOutput("regex", text)) for text in "abc")
    assert grammars.compile(StructuredOutput("regex", "c")) is third
    assert grammars.compile(StructuredOutput("regex", "b")) is second
    assert grammars.compile(StructuredOutput("regex", "a")) is not first
    long = grammars.compile(StructuredOutput("regex", "x" * 90))
    assert grammars.compile(StructuredOutput("regex", "x" * 90)) is long
    assert grammars.compile(StructuredOutput("regex", "y" * 11))
    assert grammars.compile(StructuredOutput("regex", "x" * 90)) is not long


def test_a_refusal_comes_from_the_process_with_its_place(grammars: Grammars) -> None:
    with pytest.raises(FormRefused) as refused:
        grammars.compile(StructuredOutput("json_schema", '{"items": {"not": {}}}'))
    assert (refused.value.pointer, refused.value.keyword) == ("/items/not", "not")
    with pytest.raises(FormRefused, match="no answer has this form"):
        grammars.compile(StructuredOutput("json_schema", '{"$ref": "#"}'))


@pytest.mark.parametrize(
    ("source", "problem"), [("\ud800", "surrogate"), ("é" * (MAX_SOURCE_BYTES // 2) + "a", "limit")]
)
def test_what_is_too_long_or_no_text_starts_no_process(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch, source: str, problem: str
) -> None:
    monkeypatch.setattr(grammars, "_begun", lambda: pytest.fail("a process gets it"))
    with pytest.raises(FormRefused, match=problem):
        grammars.compile(StructuredOutput("regex", source))


HOSTILE = {
    "deep": '{"items":' * 5000 + "true" + "}" * 5000,
    "alternatives": json.dumps({"enum": [str(number) for number in range(100_000)]}),
    "options": json.dumps({"enum": [*range(20_000)]}),
    "long": json.dumps({"description": "x" * (1 << 20)}),
    "expression": json.dumps({"type": "string", "pattern": "([ab]*a[ab]{900}){500}", "maxLength": 9000}),
    "products": json.dumps(
        {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(20)]} for i in range(9)]}
    ),
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_schema_is_refused(grammars: Grammars, source: str) -> None:
    with pytest.raises(FormRefused):
        grammars.compile(StructuredOutput("json_schema", source))
    assert fits(grammars.compile(StructuredOutput("regex", "a")), "a")


@pytest.mark.parametrize(("error", "limit"), [(OutOfTime, "2 s"), (OutOfMemory, "1024 MiB")])
def test_a_refusal_names_the_limit_that_ended_the_process(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch, error: type[Exception], limit: str
) -> None:
    def ended(question: str) -> str:
        raise error

    processes, _ = grammars._begun()
    monkeypatch.setattr(processes, "ask", ended)
    with pytest.raises(FormRefused, match=limit):
        grammars.compile(StructuredOutput("regex", "a"))
    assert (compiling_process.MAX_CPU_S, compiling_process.MAX_MEMORY_BYTES) == (2, 1 << 30)
