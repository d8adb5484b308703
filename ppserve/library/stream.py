"""The stream that a caller of the library reads: the chunks of one or more requests, as they are made."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from ppserve.answers import Chunk, Completion, Finish, Token, Usage, completion_of
from ppserve.core.scheduling.token_filter import TokenFilter
from ppserve.errors import Draining, RequestError, StagesLost
from ppserve.head.api.stream import Delta, RequestStream, Score
from ppserve.head.engine.loop import Engine
from ppserve.head.engine.streams import OpenRequest, Sink, TokenOutput
from ppserve.tokenizer import Tokenizer

_News = queue.SimpleQueue[tuple[str, Sequence[TokenOutput]]]


class Stream(Iterator[Chunk], AbstractContextManager["Stream"]):
    """An iterator over `Chunk`s. Reading it waits. Closing it, or leaving its block, ends the requests that still
    run. Several threads may read it; each chunk goes to one of them.

    If a request fails, its error is raised in place of its next chunk. The other requests can be read on.
    """

    def __init__(
        self,
        running: Callable[[], Engine],
        tokenizer: Tokenizer,
        requests: Mapping[str, RequestStream],
        filters: Mapping[str, TokenFilter],
        on_news: Callable[[], None] = lambda: None,
    ) -> None:
        """Queue the requests. Raises RequestError if one of them is refused, and ends the others.

        running: returns the engine, or raises why it has ended; it is a pipeline's method, so that a pipeline does
        not end before its streams. requests: by the names that their chunks will have. filters: the token filters
        of requests, by the same names. on_news: is called in the engine's thread when `arrived` may have chunks.
        """
        self._running = running
        self._tokenizer = tokenizer
        self._open: dict[str, RequestStream] = {}
        self._news: _News = queue.SimpleQueue()
        self._ready: deque[Chunk | RequestError] = deque()
        self._reading = threading.Lock()
        self._engine = running()
        self.names = tuple(requests)
        try:
            for name, pending in requests.items():
                self._open[name] = pending
                opened = OpenRequest(
                    pending.request, _sink(name, self._news, on_news), tokenizer, token_filter=filters.get(name)
                )
                self._engine.submit(opened).result()
        except BaseException:
            self.close()
            raise

    def completions(self) -> list[Completion]:
        """Read to the end, and return a completion for each request, in their order."""
        return completions_of(self.names, self)

    @property
    def is_over(self) -> bool:
        """Whether every chunk was read."""
        return not (self._open or self._ready)

    def arrived(self) -> Iterator[Chunk]:
        """Yield the chunks that are there, without waiting for more. Raises what reading the stream raises."""
        while True:
            while self._ready:
                yield self._read(self._ready.popleft())
            try:
                self._add_outputs(*self._news.get_nowait())
            except queue.Empty:
                return

    def close(self) -> None:
        """Cancel the requests that have not ended."""
        for pending in self._open.values():
            self._engine.cancel(pending.request.id)
        self._open.clear()
        self._ready.clear()

    def __next__(self) -> Chunk:
        with self._reading:
            while not self._ready:
                if not self._open:
                    raise StopIteration
                self._add_outputs(*self._news.get())
            ready = self._ready.popleft()
        return self._read(ready)

    def _read(self, ready: Chunk | RequestError) -> Chunk:
        if isinstance(ready, Draining | StagesLost):
            self._running()  # it raises the reason, which a program may know in more detail than callers
        if isinstance(ready, RequestError):
            raise ready
        return ready

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _add_outputs(self, name: str, outputs: Sequence[TokenOutput]) -> None:
        pending = self._open.get(name)
        if pending is None:
            return
        pending.push(outputs)
        try:
            self._ready.extend(self._chunk(name, pending, delta) for delta in pending.pop_deltas())
            if not pending.is_complete:
                return
        except RequestError as error:
            self._ready.append(error)
        self._open.pop(name, None)

    def _chunk(self, name: str, pending: RequestStream, delta: Delta) -> Chunk:
        request, last = pending.request, delta.last
        lists_tokens = request.output.token_ids or request.output.logprobs is not None
        usage = Usage(len(request.prompt_ids), delta.num_generated, last.cached_tokens)
        return Chunk(
            request_id=name,
            index=delta.index,
            first_token=delta.offset,
            num_tokens=len(delta.tokens),
            text=delta.text,
            tokens=tuple(self._token(*token) for token in delta.tokens) if lists_tokens else (),
            prompt_tokens=tuple(self._token(*token) for token in delta.prompt_tokens),
            seed=request.sampling.seed if delta.is_first or last.finish is not None else None,
            finish=None if last.finish is None else Finish(last.finish.value, last.matched),
            usage=None if last.finish is None else usage,
            timings=last.timings if request.output.timings else None,
        )

    def _token(self, token_id: int, score: Score) -> Token:
        token_bytes = self._tokenizer.token_bytes
        if score is None:
            return Token(token_id, token_bytes(token_id))
        top = tuple(Token(top_id, token_bytes(top_id), logprob) for top_id, logprob in score.top)
        return Token(token_id, token_bytes(token_id), score.logprob, top)


def completions_of(names: Iterable[str], chunks: Iterable[Chunk]) -> list[Completion]:
    """Return a completion for each of the requests with these names. chunks: all of theirs."""
    of_each: dict[str, list[Chunk]] = {name: [] for name in names}
    for chunk in chunks:
        of_each[chunk.request_id].append(chunk)
    return [completion_of(of_one) for of_one in of_each.values()]


def _sink(name: str, news: _News, on_news: Callable[[], None]) -> Sink:
    """Make a sink that holds no stream, so that a stream which nobody reads ends."""

    def sink(outputs: Sequence[TokenOutput]) -> None:
        news.put((name, outputs))
        on_news()

    return sink
