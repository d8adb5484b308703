"""One request's stream of answers, between the engine, which never waits, and a reader that may be slow.

The engine pushes what each step brought, and the reader takes it as deltas. A fast reader gets every token by
itself; what a slow one leaves becomes one delta for each sequence.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from itertools import accumulate

from msgspec import Struct
from msgspec.structs import replace

from ppserve.core.plan import TokenLogprobs
from ppserve.core.request import FinishReason, Request
from ppserve.errors import DeadlinePassed, RequestError
from ppserve.head.api.answer_parts.answer_format import AnswerParser, AnswerPlan
from ppserve.head.api.answer_parts.parts import Part
from ppserve.head.engine.streams import TokenOutput
from ppserve.head.limits import MAX_COUNT

Score = TokenLogprobs | None
ScoredToken = tuple[int, Score]
"""A token with its log-probability, if that is asked for; the first token of a prompt has none."""

AT_THE_END = MAX_COUNT
"""The `stream_interval` with which all of a sequence is one delta."""

FINISH_WORDS = {
    FinishReason.EOS: "stop",
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.MAX_TOKENS: "length",
    FinishReason.CONTEXT_LENGTH: "length",
    FinishReason.CANCELLED: "abort",
}
"""The words are OpenAI's, but for `abort`, vLLM's word for an end before its time."""


class Delta(Struct, frozen=True):
    """What is new of one sequence: the merged outputs of one or more steps."""

    index: int  # of the sequence
    offset: int  # of its first token among the generated tokens
    tokens: tuple[ScoredToken, ...]
    text: str  # what the tokens complete; a first delta begins with the prompt's text, if `echo`
    is_first: bool  # whether it is its sequence's first
    prompt_tokens: tuple[ScoredToken, ...]  # all, if their scores are asked for; one delta of the request has them
    parts: tuple[Part, ...]  # of the text, as far as they are certain; there are none without a plan
    has_called: bool  # whether the sequence has called a tool so far, see `AnswerParser`
    num_reasoning: int  # on a last delta: how many tokens, without those resumed from, are a reasoning
    last: TokenOutput  # the newest; its finish, matched, cached_tokens and timings hold for the sequence

    @property
    def num_generated(self) -> int:
        """The sequence's tokens so far, with those that were resumed from."""
        return self.last.offset if self.last.token_id is None else self.last.offset + 1


class RequestStream:
    """One request's outputs, from `push` until its reader takes them. One thread uses it.

    echo: the prompt's text, to be sent back. news: is set when there may be deltas; streams that are read together
    share it. deadline_is_error: whether an end at the deadline is an error, as in protocols that have no word for
    it. plan: how its answers are read; None if they are not divided into parts.
    """

    def __init__(
        self,
        request: Request,
        echo: str,
        news: asyncio.Event | None = None,
        deadline_is_error: bool = False,
        plan: AnswerPlan | None = None,
    ) -> None:
        self.request = request
        self.news = news or asyncio.Event()
        """It is set when there may be deltas."""
        self.held_text = ""
        """The text of the tokens that the caller of a resumed answer holds, once the request is submitted."""
        self._echo, self._deadline_is_error, self._plan = echo, deadline_is_error, plan
        self._interval = request.output.stream_interval
        self._scored_index = None if request.output.prompt_logprobs is None else request.indices[0]
        self._outputs: dict[int, list[TokenOutput]] = {index: [] for index in request.indices}
        self._begun: set[int] = set()
        self._parsers: dict[int, AnswerParser] = {}
        self._lengths = defaultdict[int, list[int]](list)
        """How many characters each token of a sequence has brought, where its parts are told."""
        self._error: RequestError | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every sequence's end was taken."""
        return not self._outputs

    def push(self, outputs: Iterable[TokenOutput]) -> None:
        """Add a step's outputs. Those of ended sequences are ignored."""
        for output in outputs:
            if output.error is not None:
                self.fail(output.error)
            elif self._deadline_is_error and output.finish is FinishReason.DEADLINE:
                self.fail(DeadlinePassed("the caller's time limit passed"))
                if output.token_id is not None:
                    self.push([replace(output, finish=None)])
            elif (pending := self._outputs.get(output.index)) is not None:
                pending.append(output)
        self.news.set()

    def fail(self, error: RequestError) -> None:
        """End the request with `error`, once its reader has taken what is pending."""
        self._error = self._error or error
        self.news.set()

    def pop_deltas(self) -> Iterator[Delta]:
        """Yield a delta for each sequence that is due. Raises the request's error after them."""
        for index in list(self._outputs):
            if self._is_due(index):
                yield self._pop_delta(index)
        if self._error is not None and self._outputs and not any(self._outputs.values()):
            raise self._error

    def _is_due(self, index: int) -> bool:
        outputs, scored = self._outputs[index], self._scored_index
        if not outputs or self._error is not None:
            return bool(outputs)
        if scored not in (None, index) and scored not in self._begun:
            return False  # the prompt's scores come first
        is_first = index not in self._begun and self._interval != AT_THE_END
        return is_first or outputs[-1].finish is not None or len(outputs) >= self._interval

    def _pop_delta(self, index: int) -> Delta:
        outputs = self._outputs[index]
        if outputs[-1].finish is None:
            self._outputs[index] = []
        else:
            del self._outputs[index]
        is_first = index not in self._begun
        self._begun.add(index)
        text = "".join([output.text for output in outputs]) if len(outputs) > 1 else outputs[0].text
        return Delta(
            index=index,
            offset=outputs[0].offset,
            tokens=tuple([(o.token_id, o.logprobs) for o in outputs if o.token_id is not None]),
            text=self._echo + text if is_first else text,
            is_first=is_first,
            prompt_tokens=self._prompt_tokens(outputs) if is_first and index == self._scored_index else (),
            parts=self._parts(index, text, outputs),
            has_called=index in self._parsers and self._parsers[index].has_called,
            num_reasoning=0 if outputs[-1].finish is None else self._num_reasoning(index),
            last=outputs[-1],
        )

    def _parts(self, index: int, text: str, outputs: Sequence[TokenOutput]) -> tuple[Part, ...]:
        if self._plan is None:
            return ()
        if (parser := self._parsers.get(index)) is None:
            parser = self._parsers[index] = self._plan.parser(self.request, index, self.held_text)
        self._lengths[index] += [len(output.text) for output in outputs]
        return tuple(parser.parts(text, outputs[-1].finish))

    def _num_reasoning(self, index: int) -> int:
        """How many of a sequence's tokens begin within its reasoning."""
        if index not in self._parsers:
            return 0
        begins = [*accumulate(self._lengths[index], initial=len(self.held_text))][:-1]
        thoughts = self._parsers[index].thoughts
        return sum(bisect_left(begins, end) - bisect_left(begins, begin) for begin, end in thoughts)

    def _prompt_tokens(self, outputs: Sequence[TokenOutput]) -> tuple[ScoredToken, ...]:
        """Return the prompt's tokens with their scores; none if the request ended before its prompt was scored."""
        scores = (None, *(score for output in outputs for score in output.prompt_logprobs))
        ids = self.request.prompt_ids
        return tuple(zip(ids, scores, strict=True)) if len(scores) >= len(ids) else ()


async def deltas_of(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, Delta]]:
    """Yield deltas of requests that share `news`, with their places. Raises the first error after them."""
    news = streams[0].news
    while not all(stream.is_complete for stream in streams):
        await news.wait()
        news.clear()
        for place, stream in enumerate(streams):
            for delta in stream.pop_deltas():
                yield place, delta


async def ordered_deltas_of(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, Delta]]:
    """Yield what `deltas_of` does, ordered by place and sequence, once all have ended."""
    deltas = [pair async for pair in deltas_of(streams)]
    for pair in sorted(deltas, key=lambda pair: (pair[0], pair[1].index)):
        yield pair
