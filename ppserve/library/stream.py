"""What a caller of the library reads: pieces of one or more requests, in the order in which they are made."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from ppserve.answers import Chunk, Completion, Finish, Timings, Token, Usage, completion_of
from ppserve.core.request import FinishReason, Request
from ppserve.head.api.stream import Delta, Pending, Score
from ppserve.head.engine.loop import Engine
from ppserve.head.engine.output import TokenOutput
from ppserve.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class _Entry:
    """One request of a stream. name: as its reader knows it."""

    name: str
    request: Request
    pending: Pending


class _Mailbox:
    """Where the engine's thread leaves what is new of one request. Implements `Sink`."""

    def __init__(self, entry: _Entry, news: queue.SimpleQueue[tuple[_Entry, Sequence[TokenOutput]]]) -> None:
        self._entry = entry
        self._news = news

    def push(self, outputs: Sequence[TokenOutput]) -> None:
        self._news.put((self._entry, outputs))


class Stream:
    """An iterator over `Chunk`s. Reading it waits; closing it, or leaving its block, ends what still runs.

    Raises a request's error where its next piece would be.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._entries: list[_Entry] = []
        self._news: queue.SimpleQueue[tuple[_Entry, Sequence[TokenOutput]]] = queue.SimpleQueue()
        self._chunks = self._read()

    def submit(self, request: Request, name: str, echo: str) -> None:
        """One more request. echo: its prompt, where it is to be sent back. Raises RequestError."""
        entry = _Entry(name, request, Pending(request, echo))
        self._engine.submit(request, _Mailbox(entry, self._news), self._tokenizer).result()
        self._entries.append(entry)

    def completions(self) -> list[Completion]:
        """Reads to the end: one for each request, in their order."""
        chunks: dict[str, list[Chunk]] = {entry.name: [] for entry in self._entries}
        for chunk in self:
            chunks[chunk.request_id].append(chunk)
        return [completion_of(of_one) for of_one in chunks.values()]

    def close(self) -> None:
        """Nobody reads any more: requests that have not ended are cancelled."""
        for entry in self._entries:
            if not entry.pending.is_complete:
                self._engine.cancel(entry.request.id, FinishReason.CANCELLED)
        self._entries.clear()

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _read(self) -> Iterator[Chunk]:
        while any(not entry.pending.is_complete for entry in self._entries):
            entry, outputs = self._news.get()
            entry.pending.push(outputs)
            for delta in entry.pending.take():
                yield self._chunk(entry, delta)

    def _chunk(self, entry: _Entry, delta: Delta) -> Chunk:
        output = entry.request.output
        lists_tokens = output.token_ids or output.logprobs is not None
        prompt = zip(entry.request.prompt_ids, delta.prompt_scores, strict=False)
        last = delta.last
        return Chunk(
            request_id=entry.name,
            index=delta.index,
            first_token=delta.offset,
            num_tokens=len(delta.tokens),
            text=delta.text,
            tokens=tuple(self._token(*token) for token in delta.tokens) if lists_tokens else (),
            prompt_tokens=tuple(self._token(*token) for token in prompt),
            seed=entry.request.sampling.seed if delta.is_first or last.finish is not None else None,
            finish=None if last.finish is None else Finish(last.finish.value, last.matched),
            usage=None if last.finish is None else _usage(entry.request, delta),
            timings=_timings(last) if output.timings else None,
        )

    def _token(self, token_id: int, score: Score) -> Token:
        if score is None:
            return Token(token_id, self._bytes(token_id))
        top = tuple(Token(top_id, self._bytes(top_id), logprob) for top_id, logprob in score.top)
        return Token(token_id, self._bytes(token_id), score.logprob, top)

    def _bytes(self, token_id: int) -> bytes:
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)


def _usage(request: Request, delta: Delta) -> Usage:
    return Usage(len(request.prompt_ids), delta.num_generated, delta.last.cached_tokens)


def _timings(last: TokenOutput) -> Timings | None:
    times = last.timings
    if times is None:
        return None
    return Timings(times.queue_s, times.prefill_s, times.ttft_s, times.decode_s, times.stage_busy_s)
