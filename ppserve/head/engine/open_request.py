"""The engine's record of one open request: turns its events into text, finds stop strings, measures its times.

Used in the engine's thread alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ppserve.core.request import FinishReason, Request
from ppserve.core.scheduling.sequence import SequenceEvent, end_with
from ppserve.errors import InvalidRequest, RequestError, Violation
from ppserve.head.engine.output import Sink, TimingsOutput, TokenOutput
from ppserve.tokenizer import Detokenizer, Tokenizer


@dataclass(slots=True)
class _SequenceText:
    """One sequence's detokenizer and the times of its tokens (seconds, on the head's clock)."""

    detokenizer: Detokenizer | None
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_tokens: int = 0
    has_ended: bool = False


@dataclass(slots=True)
class OpenRequest:
    """Turns one request's events into outputs until all of its sequences have ended.

    busy_s: seconds that each stage has computed so far, for requests with timings.
    """

    request: Request
    sink: Sink
    tokenizer: Tokenizer | None
    arrived_s: float
    busy_s: Callable[[], tuple[float, ...]]
    admitted_s: float | None = None
    _sequences: dict[int, _SequenceText] = field(default_factory=dict)
    _num_ended: int = 0
    _busy_at_arrival_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.request.output.timings:
            self._busy_at_arrival_s = self.busy_s()

    @property
    def is_complete(self) -> bool:
        return self._num_ended >= self.request.num_sequences

    def resume(self, eos_id: int | None, now_s: float) -> TokenOutput | None:
        """Detokenizes the tokens that the caller already has, so that the next text continues theirs.

        Returns the answer's end if those tokens contain it; then there is nothing to compute. Raises
        InvalidRequest if tokens follow the end.
        """
        index, held = self.request.resume_index or 0, self.request.resume_ids
        progress = self._progress(index)
        for count, token_id in enumerate(held, 1):
            finish = end_with(self.request, count, token_id, eos_id)
            finish, matched, _ = self._read(progress, finish, token_id)
            if finish is None:
                continue
            if count < len(held):
                problem = f"token {count - 1} of these ends the answer: nothing can follow it"
                raise InvalidRequest([Violation("resume.generated_token_ids", problem)])
            self._num_ended += 1
            timings = self._timings(progress, now_s)
            return TokenOutput(index, count, finish=finish, matched=matched, timings=timings)
        return None

    def output(self, event: SequenceEvent, now_s: float) -> TokenOutput:
        """The output for an event. Its `finish` is STOP_STRING if the text ends the sequence; then the engine must
        end it in the scheduler."""
        if event.admitted_s is not None:
            self.admitted_s = event.admitted_s
        if event.error is not None:
            self._num_ended += 1
            return TokenOutput(event.index, event.offset, error=event.error)
        progress = self._progress(event.index)
        finish, matched, text = event.finish, None, ""
        if event.token_id is not None:
            progress.num_tokens += 1
            progress.first_token_s = progress.first_token_s or now_s
            progress.last_token_s = now_s
            finish, matched, text = self._read(progress, event.finish, event.token_id)
        if finish is not None:
            self._num_ended += 1
            progress.has_ended = True
            if progress.detokenizer is not None and finish is not FinishReason.STOP_STRING:
                text += progress.detokenizer.finish()
        return TokenOutput(
            index=event.index,
            offset=event.offset,
            token_id=event.token_id,
            text=text,
            logprobs=event.logprobs,
            prompt_logprobs=event.prompt_logprobs,
            finish=finish,
            matched=matched,
            cached_tokens=event.cached_tokens,
            timings=self._timings(progress, now_s) if finish is not None else None,
        )

    def has_ended(self, index: int) -> bool:
        """Whether this sequence has had its last output."""
        progress = self._sequences.get(index)
        return progress is not None and progress.has_ended

    def fail(self, error: RequestError) -> TokenOutput:
        """The whole request ends with `error`."""
        self._num_ended = self.request.num_sequences
        return TokenOutput(0, 0, error=error)

    def _progress(self, index: int) -> _SequenceText:
        progress = self._sequences.get(index)
        if progress is None:
            progress = self._sequences[index] = _SequenceText(self._new_detokenizer())
        return progress

    def _new_detokenizer(self) -> Detokenizer | None:
        if self.tokenizer is None:
            return None
        stop = self.request.stop
        return Detokenizer(self.tokenizer, stop.stop, stop.include_stop, stop.min_tokens)

    def _read(
        self, progress: _SequenceText, finish: FinishReason | None, token_id: int
    ) -> tuple[FinishReason | None, int | str | None, str]:
        """Detokenizes a token: (finish, matched, text). finish: why the token ends the sequence, text aside."""
        ends_by_token = finish in (FinishReason.EOS, FinishReason.STOP_TOKEN)
        if progress.detokenizer is None:
            return finish, token_id if ends_by_token else None, ""
        if ends_by_token and not (finish is FinishReason.STOP_TOKEN and self.request.stop.include_stop):
            return finish, token_id, ""
        piece = progress.detokenizer.push(token_id)
        if piece.matched is not None:
            return FinishReason.STOP_STRING, piece.matched, piece.text
        return finish, token_id if ends_by_token else None, piece.text

    def _timings(self, progress: _SequenceText, now_s: float) -> TimingsOutput:
        admitted_s = self.admitted_s if self.admitted_s is not None else now_s
        first_s = progress.first_token_s or now_s
        last_s = progress.last_token_s or now_s
        busy_s: tuple[float, ...] = ()
        if self.request.output.timings:
            busy_s = tuple(a - b for a, b in zip(self.busy_s(), self._busy_at_arrival_s, strict=True))
        return TimingsOutput(
            queue_s=admitted_s - self.arrived_s,
            prefill_s=max(0.0, first_s - admitted_s),
            ttft_s=first_s - self.arrived_s,
            decode_s=last_s - first_s,
            stage_busy_s=busy_s,
        )

    def token_times(self, index: int) -> tuple[float | None, float | None, int]:
        """Of one sequence: the times of its first and its last token, and the number of tokens."""
        progress = self._sequences.get(index)
        if progress is None:
            return None, None, 0
        return progress.first_token_s, progress.last_token_s, progress.num_tokens
