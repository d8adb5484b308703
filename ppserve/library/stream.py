"""What a caller of the library reads: pieces of one or more requests, in the order in which they are made."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Self

from ppserve.answers import Chunk, Completion, Finish, Timings, Token, Usage, completion_of
from ppserve.core.request import FinishReason, Request
from ppserve.errors import Draining, RequestError, StagesLost
from ppserve.head.api.stream import Delta, Pending, Score
from ppserve.head.engine.loop import Engine
from ppserve.head.engine.open_request import OpenRequest, TokenOutput
from ppserve.tokenizer import Tokenizer

_REASON_WITHIN_S = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """One request of a stream, and the `Sink` of its outputs."""

    name: str  # as the stream's reader knows it, different for each request
    request: Request
    pending: Pending
    news: queue.SimpleQueue[tuple[_Entry, Sequence[TokenOutput]]]

    def push(self, outputs: Sequence[TokenOutput]) -> None:
        self.news.put((self, outputs))


class Stream:
    """An iterator over `Chunk`s. Reading it waits; closing it, or leaving its block, ends what still runs. Each of
    several threads that read it gets other pieces.

    Raises a request's error where its next piece would be; the other requests can be read on.
    """

    def __init__(self, owner: object, engine: Engine, tokenizer: Tokenizer | None) -> None:
        """owner: the pipeline, which must not end before its streams."""
        self._owner = owner
        self._engine = engine
        self._tokenizer = tokenizer
        self._entries: list[_Entry] = []
        self._news: queue.SimpleQueue[tuple[_Entry, Sequence[TokenOutput]]] = queue.SimpleQueue()
        self._ready: deque[Chunk | RequestError] = deque()
        self._reading = threading.Lock()

    def submit(self, request: Request, name: str, echo: str) -> None:
        """One more request. echo: its prompt, where it is to be sent back. Raises RequestError."""
        entry = _Entry(name, request, Pending(request, echo), self._news)
        self._entries.append(entry)  # before it is queued, so that `close` ends it whatever happens meanwhile
        self._engine.submit(OpenRequest(request, entry, self._tokenizer)).result()

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
        self._ready.clear()

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        with self._reading:
            while not self._ready:
                self._entries = [entry for entry in self._entries if not entry.pending.is_complete]
                if not self._entries:
                    raise StopIteration
                self._add_outputs(*self._news.get())
            piece = self._ready.popleft()
        if isinstance(piece, RequestError):
            raise self._explained(piece)
        return piece

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _add_outputs(self, entry: _Entry, outputs: Sequence[TokenOutput]) -> None:
        entry.pending.push(outputs)
        try:
            self._ready.extend(self._chunk(entry, delta) for delta in entry.pending.take())
        except RequestError as error:
            self._ready.append(error)
            self._entries = [other for other in self._entries if other is not entry]

    def _explained(self, error: RequestError) -> RequestError:
        """A server does not tell its callers why a stage was lost; a program may know."""
        if isinstance(error, StagesLost):
            return StagesLost(self._engine.failed.result(_REASON_WITHIN_S).reason)
        return Draining("this pipeline is closed") if isinstance(error, Draining) else error

    def _chunk(self, entry: _Entry, delta: Delta) -> Chunk:
        output = entry.request.output
        lists_tokens = output.token_ids or output.logprobs is not None
        prompt = zip(entry.request.prompt_ids, delta.prompt_scores, strict=False)
        last, times, num_prompt = delta.last, delta.last.timings, len(entry.request.prompt_ids)
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
            usage=None if last.finish is None else Usage(num_prompt, delta.num_generated, last.cached_tokens),
            timings=None if times is None or not output.timings else Timings(*astuple(times)),
        )

    def _token(self, token_id: int, score: Score) -> Token:
        if score is None:
            return Token(token_id, self._bytes(token_id))
        top = tuple(Token(top_id, self._bytes(top_id), logprob) for top_id, logprob in score.top)
        return Token(token_id, self._bytes(token_id), score.logprob, top)

    def _bytes(self, token_id: int) -> bytes:
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)
