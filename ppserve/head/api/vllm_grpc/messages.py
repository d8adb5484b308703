"""From deltas to the messages of one request: chunks where it streams, and each sequence's end with all of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ppserve.core.request import FinishReason, Request
from ppserve.head.api.stream import FINISH_WORDS, Delta, Score
from ppserve.vllm import engine_pb2 as pb


class SequenceMessages:
    """streams: whether chunks, and ends, are sent as they come. Otherwise the ends are sent together, by index:
    there, routers number a request's answers as they arrive.
    """

    def __init__(self, request: Request, streams: bool) -> None:
        self._request = request
        self._streams = streams
        self._tokens: dict[int, list[tuple[int, Score]]] = {}
        self._prompt_scores: Sequence[Score] = ()
        self._ends: dict[int, pb.GenerateResponse] = {}

    def answers(self, delta: Delta) -> Iterator[pb.GenerateResponse]:
        """What a delta brings: a chunk, ends, both or nothing."""
        self._prompt_scores = delta.prompt_scores or self._prompt_scores
        tokens = self._tokens.setdefault(delta.index, [])
        tokens += delta.tokens
        if self._streams:
            yield pb.GenerateResponse(chunk=self._chunk(delta))
        if delta.last.finish is not None:
            end = pb.GenerateResponse(complete=self._complete(delta, delta.last.finish, tokens))
            if self._streams:
                yield end
                return
            self._ends[delta.index] = end
            if len(self._ends) == self._request.num_sequences:
                yield from (self._ends[index] for index in sorted(self._ends))

    def _chunk(self, delta: Delta) -> pb.GenerateStreamChunk:
        return pb.GenerateStreamChunk(
            token_ids=[token_id for token_id, _ in delta.tokens],
            prompt_tokens=len(self._request.prompt_ids),
            completion_tokens=len(delta.tokens),
            cached_tokens=delta.last.cached_tokens,
            output_logprobs=self._output_logprobs(delta.tokens),
            input_logprobs=self._input_logprobs() if delta.is_first else None,
            index=delta.index,
        )

    def _complete(
        self, delta: Delta, reason: FinishReason, tokens: Sequence[tuple[int, Score]]
    ) -> pb.GenerateComplete:
        message = pb.GenerateComplete(
            output_ids=[token_id for token_id, _ in tokens],
            finish_reason=FINISH_WORDS[reason],
            prompt_tokens=len(self._request.prompt_ids),
            completion_tokens=delta.num_generated,
            cached_tokens=delta.last.cached_tokens,
            output_logprobs=self._output_logprobs(tokens),
            input_logprobs=self._input_logprobs(),
            index=delta.index,
        )
        matched = delta.last.matched
        if isinstance(matched, str):
            message.matched_stop_str = matched
        elif matched is not None and reason is FinishReason.STOP_TOKEN:
            message.matched_token_id = matched
        return message

    def _output_logprobs(self, tokens: Sequence[tuple[int, Score]]) -> pb.OutputLogProbs | None:
        num_top = self._request.output.logprobs
        if num_top is None:
            return None
        lists = pb.OutputLogProbs()
        for token_id, score in tokens:
            assert score is not None, "asked for"
            lists.token_ids.append(token_id)
            lists.token_logprobs.append(score.logprob)
            if num_top:
                lists.top_logprobs.append(_top(score))
        return lists

    def _input_logprobs(self) -> pb.InputLogProbs | None:
        if not self._prompt_scores:
            return None
        lists = pb.InputLogProbs(token_ids=self._request.prompt_ids)
        for score in self._prompt_scores:
            lists.token_logprobs.append(pb.InputTokenLogProb(value=None if score is None else score.logprob))
            if self._request.output.prompt_logprobs:
                lists.top_logprobs.append(_top(score))
        return lists


def _top(score: Score) -> pb.TopLogProbs:
    top = () if score is None else score.top
    return pb.TopLogProbs(token_ids=[top_id for top_id, _ in top], values=[logprob for _, logprob in top])
