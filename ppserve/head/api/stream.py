"""One call's stream of answers, between the engine, which never waits, and a reader, who may be slow.

The engine pushes what each step brought; the call's handler takes it from here as messages. What a slow
reader has not taken yet is merged into one message per sequence, so a stream holds at most the tokens of
its sequences, and a reader who is fast sees every token as it comes.

Everything here runs in the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from ppserve.core.plan import TokenLogprobs
from ppserve.core.request import FinishReason, Request
from ppserve.errors import RequestError
from ppserve.head.engine.output import TokenOutput
from ppserve.v1 import generation_pb2 as pb

REASONS = {reason: pb.Finish.Reason.Value(reason.value) for reason in FinishReason}


class MessageWriter:
    """Makes messages from outputs, by what the request asked for.

    public_id: the request's id as its caller knows it. echo: the prompt's text, when it is to be sent back.
    token_bytes: the bytes of a token.
    """

    def __init__(self, request: Request, public_id: str, echo: str, token_bytes: Callable[[int], bytes]) -> None:
        self._request = request
        self._public_id = public_id
        self._echo = echo
        self._token_bytes = token_bytes
        self._lists_tokens = request.output.token_ids or request.output.logprobs is not None
        self._scored_index = request.resume_index or 0

    def message(self, outputs: Sequence[TokenOutput], is_first: bool) -> pb.GenerateResponse:
        """One message for consecutive outputs of one sequence."""
        last = outputs[-1]
        drawn = [output for output in outputs if output.token_id is not None]
        message = pb.GenerateResponse(
            request_id=self._public_id,
            index=last.index,
            first_token=outputs[0].offset,
            num_tokens=len(drawn),
            text="".join([output.text for output in outputs]) if len(outputs) > 1 else last.text,
        )
        if self._lists_tokens:
            for output in drawn:
                assert output.token_id is not None
                message.tokens.append(self._token(output.token_id, output.logprobs))
        if is_first:
            self._add_prompt(message, outputs)
        if last.finish is not None:
            self._add_end(message, last, last.finish)
        return message

    def _add_prompt(self, message: pb.GenerateResponse, outputs: Sequence[TokenOutput]) -> None:
        message.seed = self._request.sampling.seed
        if self._echo:
            message.text = self._echo + message.text
        if self._request.output.prompt_logprobs is not None and message.index == self._scored_index:
            scores = [None, *(score for output in outputs for score in output.prompt_logprobs)]
            if len(scores) < len(self._request.prompt_ids):
                return  # it ended before its prompt was scored
            for token_id, score in zip(self._request.prompt_ids, scores, strict=True):
                message.prompt_tokens.append(self._token(token_id, score))

    def _add_end(self, message: pb.GenerateResponse, last: TokenOutput, reason: FinishReason) -> None:
        message.seed = self._request.sampling.seed
        message.finish.reason = REASONS[reason]  # type: ignore[assignment]
        if isinstance(last.matched, str):
            message.finish.stop = last.matched
        elif last.matched is not None:
            message.finish.token_id = last.matched
        message.usage.prompt_tokens = len(self._request.prompt_ids)
        message.usage.completion_tokens = last.offset + (last.token_id is not None)
        message.usage.cached_tokens = last.cached_tokens
        if self._request.output.timings and last.timings is not None:
            message.timings.queue_seconds = last.timings.queue_s
            message.timings.prefill_seconds = last.timings.prefill_s
            message.timings.ttft_seconds = last.timings.ttft_s
            message.timings.decode_seconds = last.timings.decode_s
            message.timings.stage_busy_seconds.extend(last.timings.stage_busy_s)

    def _token(self, token_id: int, score: TokenLogprobs | None) -> pb.TokenInfo:
        token = pb.TokenInfo(id=token_id, bytes=self._token_bytes(token_id))
        if score is not None:
            token.logprob = score.logprob
            for top_id, logprob in score.top:
                token.top.add(id=top_id, bytes=self._token_bytes(top_id), logprob=logprob)
        return token


class RequestStream:
    """What the engine has for one request and its reader has not taken yet. Implements `Sink`."""

    def __init__(self, request: Request, writer: MessageWriter) -> None:
        resumed = request.resume_index
        indices = range(request.num_sequences) if resumed is None else range(resumed, resumed + 1)
        self._writer = writer
        self._interval = request.output.stream_interval
        self._pending: dict[int, list[TokenOutput]] = {index: [] for index in indices}
        self._begun: set[int] = set()
        self._error: RequestError | None = None
        self._news = asyncio.Event()

    @property
    def is_complete(self) -> bool:
        """Whether every sequence's end was taken."""
        return not self._pending

    def push(self, outputs: Sequence[TokenOutput]) -> None:
        """Take one step's outputs; those of sequences that ended are ignored."""
        for output in outputs:
            if output.error is not None:
                self._error = self._error or output.error
            elif (pending := self._pending.get(output.index)) is not None:
                pending.append(output)
        self._news.set()

    def fail(self, error: RequestError) -> None:
        """End the stream with `error` after what is pending."""
        self._error = self._error or error
        self._news.set()

    async def messages(self) -> AsyncIterator[pb.GenerateResponse]:
        """Messages until every sequence has ended. Raises the request's error after what came before it."""
        while self._pending:
            await self._news.wait()
            self._news.clear()
            for index in [index for index in self._pending if self._is_due(index)]:
                yield self._take(index)
            if self._error is not None and self._pending and not any(self._pending.values()):
                raise self._error

    def _is_due(self, index: int) -> bool:
        pending = self._pending[index]
        if not pending:
            return False
        enough = len(pending) >= self._interval or index not in self._begun
        return enough or pending[-1].finish is not None or self._error is not None

    def _take(self, index: int) -> pb.GenerateResponse:
        """All that is pending of a sequence as one message: also what came while others were written."""
        outputs = self._pending[index]
        if outputs[-1].finish is None:
            self._pending[index] = []
        else:
            del self._pending[index]
        is_first = index not in self._begun
        self._begun.add(index)
        return self._writer.message(outputs, is_first)
