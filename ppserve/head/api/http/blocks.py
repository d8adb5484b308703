"""An answer as a row of blocks, for doors that tell where each begins and ends: a text, a reasoning, a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ppserve.core.request import Request
from ppserve.head.api.call import Call
from ppserve.head.api.http.answers import Answers, Json, told_seed
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
    text: str = ""  # of a call: its arguments, as JSON
    call_id: str = ""
    name: str = ""  # of the called function


@dataclass(frozen=True, slots=True)
class BlockChange:
    """What is new of a block."""

    what: Literal["begins", "grows", "ends"]
    block: AnswerBlock
    text: str = ""  # by which it grows


class Blocks:
    """Makes blocks of one sequence's parts, as they come."""

    def __init__(self) -> None:
        self.blocks: list[AnswerBlock] = []
        self._open: AnswerBlock | None = None

    def add(self, kind: BlockKind, text: str) -> Iterator[BlockChange]:
        """Add to the last block, or begin one where that is of another kind."""
        if not text:
            return
        if self._open is None or self._open.kind != kind:
            yield from self.end()
            yield self._begin(AnswerBlock(len(self.blocks), kind))
        assert self._open is not None
        self._open.text += text
        yield BlockChange("grows", self._open, text)

    def end(self) -> Iterator[BlockChange]:
        """End the last block, if it is open."""
        if self._open is not None:
            yield BlockChange("ends", self._open)
            self._open = None

    def _begin(self, block: AnswerBlock) -> BlockChange:
        self.blocks.append(block)
        self._open = block
        return BlockChange("begins", block)


class BlockAnswers(Answers):
    """The answer to one chat: one sequence, told as blocks."""

    def __init__(
        self, call: Call, body: GenerationBody, requests: Sequence[Request], handler: RequestHandler
    ) -> None:
        (self._request,) = requests
        self._id = call.request_id
        self._facts: Json = {
            "model": handler.description.name,
            "system_fingerprint": handler.description.fingerprint,
            "seed": told_seed(body, self._request),
        }
        self._row = Blocks()
        self._newest: Delta | None = None

    def whole(self, deltas: Sequence[tuple[int, Delta]]) -> bytes:
        ((_, self._newest),) = deltas
        for _ in self._row.add("text", self._newest.text):
            pass
        return encode(self._whole(self._newest))

    def events(self, _place: int, delta: Delta) -> Iterator[bytes]:
        self._newest = delta
        for change in self._row.add("text", delta.text):
            yield from self._block_events(change)

    def ending(self) -> Iterator[bytes]:
        for change in self._row.end():
            yield from self._block_events(change)
        assert self._newest is not None, "a stream has a delta"
        yield from self._end_events(self._newest)

    def _whole(self, last: Delta) -> Json:
        """Return the whole answer. last: the delta that has its end."""
        raise NotImplementedError

    def _block_events(self, change: BlockChange) -> Iterator[bytes]:
        raise NotImplementedError

    def _end_events(self, last: Delta) -> Iterator[bytes]:
        raise NotImplementedError
