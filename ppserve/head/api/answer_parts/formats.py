"""The formats that are known, and which of them a chat template shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ppserve.head.api.answer_parts.answer_format import AnswerFormat, ReasoningFormat
from ppserve.head.api.answer_parts.bare_json import BARE_JSON
from ppserve.head.api.answer_parts.channels import CHANNELS
from ppserve.head.api.answer_parts.hermes import Hermes
from ppserve.head.api.answer_parts.llama3 import Llama3
from ppserve.head.api.answer_parts.mistral import Mistral, Mistral11
from ppserve.head.api.answer_parts.qwen_coder import QwenCoder
from ppserve.head.api.answer_parts.reasoning import THINK
from ppserve.head.api.answer_parts.tool_format import ToolFormat

TOOL_FORMATS: Sequence[ToolFormat] = (CHANNELS, Hermes(), QwenCoder(), Mistral(), Mistral11(), Llama3(), BARE_JSON)
REASONING_FORMATS: Sequence[ReasoningFormat] = (CHANNELS, THINK)

AUTO, NONE = "auto", "none"
TOOL_FORMAT_NAMES = (AUTO, NONE, *(each.name for each in TOOL_FORMATS))
REASONING_FORMAT_NAMES = (AUTO, NONE, *(each.name for each in REASONING_FORMATS))


@dataclass(frozen=True, slots=True)
class FormatNames:
    """The formats that the operator wants: by their names, or `auto` for what the template shows."""

    tools: str = AUTO
    reasoning: str = AUTO


F = TypeVar("F", bound=ToolFormat | ReasoningFormat)


def answer_format(
    template: str, special_ids: Mapping[str, int], names: FormatNames = FormatNames()
) -> AnswerFormat:
    """Return the format of a model's answers. special_ids: the ids of its special tokens, by their texts."""
    return AnswerFormat(
        tools=_chosen(TOOL_FORMATS, names.tools, template),
        reasoning=_chosen(REASONING_FORMATS, names.reasoning, template),
        fallback=BARE_JSON,
        special_ids=special_ids,
    )


def _chosen(formats: Sequence[F], name: str, template: str) -> F | None:
    fits = (each for each in formats if each.name == name or (name == AUTO and each.is_shown_by(template)))
    return next(fits, None)
