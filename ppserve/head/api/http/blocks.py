"""An answer as blocks, each a text, a reasoning or a call, for paths that say where each begins and ends."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ppserve.core.request import Request
from ppserve.head.api.answer_parts.answer_format import CUTS
from ppserve.head.api.answer_parts.parts import AnswerText, CallArguments, CallBegin, CallEnd, Part, Reasoning
from ppserve.head.api.call import Call
from ppserve.head.api.http.answers import Answers, Json, shown_seed
from ppserve.head.api.http.bodies import GenerationBody
from ppserve.head.api.http.responses import encode
from ppserve.head.api.request_handler import RequestHandler
from ppserve.head.api.stream import Delta

BlockKind = Literal["text", "reasoning", "call"]


@dataclass(slots=True)
class AnswerBlock:
    """One block of an answer, as far as it has come."""

    index: int
    kind: BlockKind
    text: str = ""  # in a call: its arguments, as JSON
    call_id: str = ""
    name: str = ""  # of the called function
    is_whole: bool = False  # whether it has ended, and was not cut


@dataclass(frozen=True, slots=True)
class BlockChange:
    """A block that begins, grows or ends."""

    what: Literal["begins", "grows", "ends"]
    block: AnswerBlock
    text: str = ""  # by which it grows


class Blocks:
    """Makes blocks of one sequence's parts as they come."""

    def __init__(self) -> None:
        self.blocks: list[AnswerBlock] = []
        self._open: AnswerBlock | None = None

    def add(self, part: Part) -> Iterator[BlockChange]:
        """Add to the last block, or begin one where the part belongs to another."""
        match part:
            case AnswerText(text=text):
                yield from self._grow("text", text)
            case Reasoning(text=text):
                yield from self._grow("reasoning", text)
            case CallBegin(id=call_id, name=name):
                yield from self.end()
                yield self._begin(AnswerBlock(len(self.blocks), "call", call_id=call_id, name=name))
            case CallArguments(text=text):
                yield from self._grow("call", text)
            case CallEnd():
                yield from self.end()

    def end(self, is_whole: bool = True) -> Iterator[BlockChange]:
        """End the last block, if it is open."""
        if self._open is not None:
            self._open.is_whole = is_whole
            yield BlockChange("ends", self._open)
            self._open = None

    def end_answer(self, is_cut: bool) -> Iterator[BlockChange]:
        """End the last block with the answer. A call that is open then lacks some of its arguments."""
        yield from self.end(not is_cut and self._open is not None and self._open.kind != "call")

    def _grow(self, kind: BlockKind, text: str) -> Iterator[BlockChange]:
        if self._open is None or self._open.kind != kind:
            assert kind != "call", "arguments follow the beginning of their call"
            yield from self.end()
            yield self._begin(AnswerBlock(len(self.blocks), kind))
        assert self._open is not None
        self._open.text += text
        yield BlockChange("grows", self._open, text)

    def _begin(self, block: AnswerBlock) -> BlockChange:
        self.blocks.append(block)
        self._open = block
        return BlockChange("begins", block)


class BlockAnswers(Answers):
    """The answer to one chat: one sequence, as blocks."""

    def __init__(
        self, call: Call, body: GenerationBody, requests: Sequence[Request], handler: RequestHandler
    ) -> None:
        (self._request,) = requests
        self._id = call.request_id
        self._facts: Json = {
            "model": handler.description.name,
            "system_fingerprint": handler.description.fingerprint,
            "seed": shown_seed(body, self._request),
        }
        self._shows_reasoning = True
        self._row = Blocks()
        self._newest: Delta | None = None

    def whole(self, deltas: Sequence[tuple[int, Delta]]) -> bytes:
        ((_, self._newest),) = deltas
        deque((*self._changes(self._newest), *self._row.end_answer(self._is_cut)), maxlen=0)
        return encode(self._whole(self._newest))

    def events(self, _place: int, delta: Delta) -> Iterator[bytes]:
        self._newest = delta
        for change in self._changes(delta):
            yield from self._block_events(change)

    @property
    def _is_cut(self) -> bool:
        """Whether the answer has ended where the model would not have ended it."""
        return self._newest is not None and self._newest.last.finish in CUTS

    def _changes(self, delta: Delta) -> Iterator[BlockChange]:
        for part in delta.parts:
            if self._shows_reasoning or not isinstance(part, Reasoning):
                yield from self._row.add(part)

    def ending(self) -> Iterator[bytes]:
        assert self._newest is not None, "a stream has a delta"
        for change in self._row.end_answer(self._is_cut):
            yield from self._block_events(change)
        yield from self._end_events(self._newest)

    @abstractmethod
    def _whole(self, last: Delta) -> Json:
        """Return the whole answer. last: the delta that has its end."""

    @abstractmethod
    def _block_events(self, change: BlockChange) -> Iterator[bytes]:
        """Yield the events of one change of a block."""

    @abstractmethod
    def _end_events(self, last: Delta) -> Iterator[bytes]:
        """Yield the events that end the stream. last: the delta that has the answer's end."""
