"""`AsyncPipeline`: a pipeline for programs with an event loop. It computes in threads, as `Pipeline` does."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from typing import Self, Unpack

from ppserve.answers import Chunk, Completion, Options, PromptOrChat, ReadPrompt
from ppserve.head.descriptions import ModelDescription, Topology
from ppserve.library.ledger import Ledger
from ppserve.library.pipeline import Pipeline, as_prompts
from ppserve.library.settings import Settings
from ppserve.library.stream import Stream, completions_of


class AsyncPipeline(AbstractAsyncContextManager["AsyncPipeline"]):
    """A `Pipeline` whose methods are coroutines and asynchronous iterators. Its arguments are those of `Pipeline`.

    The model is loaded when the `async with` block begins, and released when it ends. While requests run, the
    event loop is free, and no thread waits for them.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "tiny",
        stages: int | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        self._make = lambda: Pipeline(model, stages, **settings)
        self._made: Pipeline | None = None

    async def __aenter__(self) -> Self:
        self._made = await asyncio.to_thread(self._make)
        return self

    async def __aexit__(self, *_error: object) -> None:
        await asyncio.to_thread(self._pipeline.close)

    @property
    def model(self) -> ModelDescription:
        """What is computed, in which arithmetic, and whether the promises hold here."""
        return self._pipeline.model

    async def stream(
        self, prompt: PromptOrChat | Sequence[PromptOrChat], **options: Unpack[Options]
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of `Pipeline.stream`. Closing the iterator ends its requests. Raises the same as
        `Pipeline.stream`, and the first error of a request, which ends the stream."""
        incoming = await self._submit(as_prompts(prompt), options)
        async for chunk in incoming.chunks():
            yield chunk

    async def complete(self, prompt: PromptOrChat, **options: Unpack[Options]) -> Completion:
        """Wait for the whole answer."""
        return (await self.complete_all([prompt], **options))[0]

    async def complete_all(self, prompts: Sequence[PromptOrChat], **options: Unpack[Options]) -> list[Completion]:
        """Complete all of these prompts together. Completions come in the order of prompts."""
        incoming = await self._submit(as_prompts(prompts) if len(prompts) else [], options)
        return completions_of(incoming.stream.names, [chunk async for chunk in incoming.chunks()])

    async def _submit(self, prompts: Sequence[ReadPrompt], options: Options) -> _StreamHere:
        """Queue the requests, in a thread, because a long text takes a while to tokenize."""
        loop, has_news = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            """Wake the program's event loop. The engine's thread calls this, even if the loop is closed
            already."""
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(has_news.set)

        return _StreamHere(await asyncio.to_thread(self._pipeline.submit, prompts, options, wake), has_news)

    async def topology(self) -> Topology:
        """Return what each stage holds, and how long its steps take."""
        return await asyncio.to_thread(self._pipeline.topology)

    async def ledger(self) -> Ledger:
        """Return where every stage's time went, from the making of the pipeline to now."""
        return await asyncio.to_thread(self._pipeline.ledger)

    @property
    def _pipeline(self) -> Pipeline:
        if self._made is None:
            raise RuntimeError("use it in a block: async with AsyncPipeline(...) as pipeline")
        return self._made


@dataclass(frozen=True, slots=True)
class _StreamHere:
    """A stream, and the event of a program's loop that is set when the stream may have chunks."""

    stream: Stream
    has_news: asyncio.Event

    async def chunks(self) -> AsyncGenerator[Chunk, None]:
        with self.stream as stream:
            while not stream.is_over:
                await self.has_news.wait()
                self.has_news.clear()
                for chunk in stream.arrived():
                    yield chunk
