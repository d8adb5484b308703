"""The format of one model's answers, and what it means for one request."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ppserve.core.request import FinishReason, Request
from ppserve.errors import InvalidRequest, Violation, refuse
from ppserve.grammar.structured_output import StructuredOutput
from ppserve.head.api.answer_parts.channels import Channels
from ppserve.head.api.answer_parts.json_calls import Calls
from ppserve.head.api.answer_parts.parts import AnswerText, CallBegin, CallEnd, Part, Reasoning, merged
from ppserve.head.api.answer_parts.reasoning import Tags
from ppserve.head.api.answer_parts.source import AnswerEnds, Parsing, Source
from ppserve.head.api.answer_parts.tool_format import ANY_TEXT, FormPart, ToolFormat
from ppserve.head.api.answer_parts.tools import Tooling
from ppserve.head.options import GenerationOptions

CUTS = (FinishReason.MAX_TOKENS, FinishReason.CONTEXT_LENGTH, FinishReason.CANCELLED, FinishReason.DEADLINE)
"""The reasons for an end at which the model would have gone on."""

STOPS = (FinishReason.STOP_STRING, FinishReason.STOP_TOKEN)
"""The reasons for an end that the caller has chosen."""

ID_CHARS = 9
"""The length of a call's id: Mistral's templates take no other."""

ReasoningFormat = Tags | Channels
Reader = Callable[[Source, Calls], Parsing[None]]


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes its answers. None stands for a format that is not known.

    fallback: the format of calls that must be made, if the model's own is not known.
    """

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    fallback: ToolFormat
    special_ids: Mapping[str, int]
    """The model's special tokens, by their texts."""

    def plan(self, tooling: Tooling, prompt: str, text: StructuredOutput | None = None) -> AnswerPlan:
        """Return how the answers to one request are made and read.

        prompt: at least its end. text: the form of an answer that calls nothing.
        Raises InvalidRequest for tools whose calls could not be read, or must be made beside such a text.
        """
        offered, reasoning = tooling.offered, self.reasoning
        form = self.tools or self.fallback
        if offered and self.tools is None and not tooling.is_forced:
            problem = "the chat template shows no format of calls that is known here: see --tool-format"
            raise InvalidRequest([Violation("tools", problem)])
        if offered and text is not None:
            refuse(_violations(tooling, text))
        has_begun = reasoning is not None and reasoning.is_begun_by(prompt)

        def read(source: Source, calls: Calls) -> Parsing[None]:
            if reasoning is not None:
                yield from reasoning.read_reasoning(source, calls, has_begun)
            if offered and not (text is not None and (yield from _is_text(source, form.marker))):
                yield from form.read(source, calls)
            yield from source.until((), AnswerText)

        special = (*(reasoning.special if reasoning else ()), *(form.special if offered else ()))
        must_fit: list[FormPart] = []
        all_strict = tooling.is_forced or text is not None
        tools = [replace(tool, strict=True) if all_strict else tool for tool in tooling.callable]
        if len(tools) < len(offered) or any(tool.strict for tool in tools):
            must_fit += [reasoning.reasoning(has_begun)] if reasoning else []
            if text is not None:
                part: FormPart = {"kind": text.kind, "source": text.source}
                must_fit.append(form.calls_or_text(tools, tooling.max_calls, part))
            else:
                make = form.calls if tooling.is_forced else form.text_and_calls
                must_fit.append(make(tools, tooling.max_calls))
        return AnswerPlan(
            read=read,
            tooling=tooling,
            form=StructuredOutput("sequence", json.dumps(self._resolved(must_fit))) if must_fit else None,
            shows_special=any(text in self.special_ids for text in special),
        )

    def _resolved(self, form: FormPart) -> FormPart:
        """Return the form with special tokens by their ids."""
        match form:
            case str():
                parts = _split(form, self.special_ids)
                return parts[0] if len(parts) == 1 else [*parts]
            case list():
                return [self._resolved(each) for each in form]
            case {"until": str(text)} if text in self.special_ids:
                return [ANY_TEXT, {"token": self.special_ids[text]}]
            case {"either": each} | {"any_number": each} | {"maybe": each}:
                return {name: self._resolved(each) for name in form}
        return form


def _violations(tooling: Tooling, text: StructuredOutput) -> Iterator[Violation]:
    """Yield why answers cannot be calls or a text of a form."""
    if tooling.is_forced:
        yield Violation("structured_output", "not together with tools that must be called")
    elif text.kind not in ("json_object", "json_schema"):  # other texts may begin as calls do
        yield Violation("structured_output", "not together with tools: only JSON is")


def _is_text(source: Source, marker: str) -> Parsing[bool]:
    """Return whether an answer that is either calls or JSON is JSON, which may have the marker in its strings.

    A format of channels has no marker: its channels tell the two apart.
    """
    if not marker:
        return False
    source.hold()
    yield from source.next_visible()
    if (yield from source.starts_with(marker)):
        source.unread(marker)
        return False
    yield from source.release()
    return True


def _split(text: str, special_ids: Mapping[str, int]) -> list[Any]:
    """Return the text's parts: texts, and special tokens by their ids."""
    words = sorted((word for word in special_ids if len(word) > 1), key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, words)) + ")", text) if words else [text]
    return [{"token": special_ids[part]} if place % 2 else part for place, part in enumerate(parts)]


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How the answers to one request are made and read."""

    read: Reader
    tooling: Tooling
    form: StructuredOutput | None
    """What the answers must look like; None if the request's own form, or none, says it."""
    shows_special: bool
    """Whether the answers must be read with the names of special tokens in their text."""

    def adjusted(self, given: GenerationOptions) -> GenerationOptions:
        """Return a request's options with what its answers need to be made and read so."""
        if self.shows_special:
            given = replace(given, skip_special_tokens=False)
        return given if self.form is None else replace(given, structured_output=self.form)

    def parser(self, request: Request, index: int, held_text: str = "") -> AnswerParser:
        """Return the parser of one answer.

        held_text: the text that the caller of a resumed answer holds. Its parts are not told again.
        """
        schemas = {tool.name: tool.schema for tool in self.tooling.offered}
        parser = AnswerParser(self.read, Calls(_ids_of(request, index), schemas), self.tooling.max_calls)
        parser.parts(held_text, None)
        return parser


def _ids_of(request: Request, index: int) -> Callable[[int], str]:
    """Make ids of calls. They differ between chats, and between answers of other seeds."""

    def make(number: int) -> str:
        said = f"{request.sampling.seed} {index} {number} {request.prompt_ids}"
        return base64.b32encode(hashlib.sha256(said.encode()).digest())[:ID_CHARS].decode().lower()

    return make


class AnswerParser:
    """Makes parts of one answer's text as it comes. Joined, the parts do not depend on how the text was cut."""

    def __init__(self, read: Reader, calls: Calls, max_calls: int | None = None) -> None:
        """max_calls: calls beyond so many are left out; None if there is no limit."""
        self._source = Source()
        self._calls = calls
        self._reading = self._read(read)
        self._max_calls = max_calls
        self._is_calling = False
        self._stopped_call = False
        self.thoughts: list[tuple[int, int]] = []
        """Where in the text the reasoning is: the places before which its pieces begin and end."""

    def parts(self, text: str, finish: FinishReason | None) -> list[Part]:
        """Return the parts that are certain with this text. finish: why the answer ends with it, if it does."""
        self._source.add(text)
        if finish is not None:
            self._source.end(finish in (*CUTS, FinishReason.STOP_STRING))
        parts = merged(self._next_parts())
        self._stopped_call = self._is_calling and finish in STOPS
        return parts

    def _next_parts(self) -> Iterator[Part]:
        for part in self._reading:
            if part is None:
                return
            if isinstance(part, Reasoning):
                self.thoughts.append((self._source.place - len(part.text), self._source.place))
            index = getattr(part, "index", None)
            if index is None or self._max_calls is None or index < self._max_calls:
                if isinstance(part, CallBegin | CallEnd):
                    self._is_calling = isinstance(part, CallBegin)
                yield part

    @property
    def has_called(self) -> bool:
        """Whether a call of a tool has begun, and the caller's own stop has not cut the last one that is told."""
        return self._calls.count > 0 and not self._stopped_call

    def _read(self, read: Reader) -> Parsing[None]:
        try:
            yield from read(self._source, self._calls)
        except AnswerEnds:
            yield from self._source.release()
