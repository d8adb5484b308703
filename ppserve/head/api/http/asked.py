"""Records of what a body asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ppserve.head.api.answer_parts.answer_format import AnswerPlan
from ppserve.head.api.requests import Prompt
from ppserve.head.options import GenerationOptions


class Resume(msgspec.Struct, forbid_unknown_fields=True):
    """A sequence whose stream broke, and those of its tokens that the caller holds."""

    token_ids: list[int]
    index: int = 0


class StreamOptions(msgspec.Struct):
    """Which events of a stream tell the usage."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    @property
    def asks(self) -> bool:
        """Whether any event is to tell it."""
        return bool(self.include_usage or self.continuous_usage_stats)


@dataclass(frozen=True, slots=True)
class Asked:
    """The prompts and options of a body. plan: how the answers are read; None if they are only text."""

    prompts: Sequence[Prompt]
    options: GenerationOptions
    plan: AnswerPlan | None = None
