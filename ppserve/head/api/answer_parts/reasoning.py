"""The formats in which models write what they think before they answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppserve.head.api.answer_parts.json_calls import Calls
from ppserve.head.api.answer_parts.parts import Reasoning
from ppserve.head.api.answer_parts.source import Parsing, Source
from ppserve.head.api.answer_parts.tool_format import FormPart


@dataclass(frozen=True, slots=True)
class Tags:
    """Reasoning between two tags. The prompt may have the first of them."""

    name: str
    """The operator's word for it (`--reasoning-format`)."""
    begin: str
    end: str

    @property
    def special(self) -> Sequence[str]:
        """The texts of tokens that it is written with, where they are special ones."""
        return self.begin, self.end

    def is_shown_by(self, template: str) -> bool:
        """Return whether a chat template writes or removes such reasoning."""
        return self.end in template

    def is_begun_by(self, prompt: str) -> bool:
        """Return whether a prompt ends within the reasoning."""
        return prompt.rstrip().endswith(self.begin)

    def read_reasoning(self, source: Source, _calls: Calls, has_begun: bool) -> Parsing[None]:
        """Read the reasoning at the beginning of an answer. Raises AnswerEnds."""
        source.hold()
        yield from source.next_visible()
        if not has_begun and not (yield from source.starts_with(self.begin)):
            yield from source.release()
            return
        source.let_go()
        yield from source.next_visible()
        yield from source.until((self.end,), Reasoning)
        yield from source.next_visible()

    def reasoning(self, has_begun: bool) -> FormPart:
        """Return the form of the reasoning."""
        rest: FormPart = [{"until": self.end}, {"maybe": "\n\n"}]
        return rest if has_begun else {"maybe": [self.begin, rest]}


THINK = Tags("think", "<think>", "</think>")
"""The tags of Qwen, DeepSeek and many others."""
