"""The engine's record of one open request: turns its events into text, finds stop strings, measures its times.

Used in the engine's thread alone, but for `read_held`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ppserve.core.request import FinishReason, Request
from ppserve.core.scheduling.sequence import SequenceEvent
from ppserve.errors import InvalidRequest, RequestError, Violation
from ppserve.head.engine.output import Sink, TimingsOutput, TokenOutput
from ppserve.tokenizer import Detokenizer, Tokenizer


@dataclass(slots=True)
class SequenceProgress:
    """One sequence's text so far, and the times of its tokens on the head's clock."""

    detokenizer: Detokenizer | None
    first_token_s: float | None = None
    last_token_s: float | None = None
    gap_s: float | None = None  # between its last two tokens
    num_tokens: int = 0
    has_ended: bool = False

    def note_token(self, now_s: float) -> None:
        self.num_tokens += 1
        self.gap_s = None if self.last_token_s is None else now_s - self.last_token_s
        self.first_token_s = self.first_token_s or now_s
        self.last_token_s = now_s

    def read(
        self, request: Request, finish: FinishReason | None, token_id: int
    ) -> tuple[FinishReason | None, int | str | None, str]:
        """Detokenizes a token: (finish, matched, text). finish: why the token ends the sequence, text aside."""
        ends_by_token = finish in (FinishReason.EOS, FinishReason.STOP_TOKEN)
        if self.detokenizer is None:
            return finish, token_id if ends_by_token else None, ""
        if ends_by_token and not (finish is FinishReason.STOP_TOKEN and request.stop.include_stop):
            return finish, token_id, ""
        piece = self.detokenizer.push(token_id)
        if piece.matched is not None:
            return FinishReason.STOP_STRING, piece.matched, piece.text
        return finish, token_id if ends_by_token else None, piece.text


def _new_progress(request: Request, tokenizer: Tokenizer | None) -> SequenceProgress:
    if tokenizer is None:
        return SequenceProgress(None)
    stop = request.stop
    return SequenceProgress(Detokenizer(tokenizer, stop.stop, stop.include_stop, stop.min_tokens))


@dataclass(slots=True)
class HeldAnswer:
    """What the caller of a resumed answer has. The engine owns it once the request is submitted."""

    text: SequenceProgress
    finish: FinishReason | None = None  # why these tokens end the answer; None if they do not
    matched: int | str | None = None  # as in `TokenOutput`


def read_held(request: Request, tokenizer: Tokenizer | None, eos_id: int | None) -> HeldAnswer | None:
    """Detokenizes the tokens that the caller already has; None if the request resumes nothing. It may take
    milliseconds, so it is not for the engine's thread. Raises InvalidRequest if tokens follow the end."""
    if not request.resume_ids:
        return None
    held, num_held = HeldAnswer(_new_progress(request, tokenizer)), len(request.resume_ids)
    for count, token_id in enumerate(request.resume_ids, 1):
        finish = request.end_after(count, token_id, eos_id)
        held.finish, held.matched, _ = held.text.read(request, finish, token_id)
        if held.finish is not None and count < num_held:
            problem = f"token {count - 1} of these ends the answer: nothing can follow it"
            raise InvalidRequest([Violation("resume.generated_token_ids", problem)])
    return held


@dataclass(slots=True)
class OpenRequest:
    """An open request: turns its events into outputs until all of its sequences have ended."""

    request: Request
    sink: Sink
    tokenizer: Tokenizer | None
    arrived_s: float
    busy_s: Callable[[], tuple[float, ...]]  # returns seconds that each stage has computed, for timings
    admitted_s: float | None = None
    replica: int | None = None
    error: RequestError | None = None  # the first of a sequence, which ends the request for its caller
    num_outputs: int = 0
    num_tokens: int = 0  # of all sequences
    _sequences: dict[int, SequenceProgress] = field(default_factory=dict)
    _num_ended: int = 0
    _busy_at_arrival_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.request.output.timings:
            self._busy_at_arrival_s = self.busy_s()

    @property
    def is_complete(self) -> bool:
        return self._num_ended >= self.request.num_sequences

    def resume(self, held: HeldAnswer, now_s: float) -> TokenOutput | None:
        """The next text continues what the caller holds. Returns the answer's end if that contains it; then there
        is nothing to compute."""
        index = self.request.resume_index or 0
        self._sequences[index] = held.text
        if held.finish is None:
            return None
        self._num_ended += 1
        timings = self._timings(held.text, now_s)
        count = len(self.request.resume_ids)
        return TokenOutput(index, count, finish=held.finish, matched=held.matched, timings=timings)

    def output(self, event: SequenceEvent, now_s: float) -> TokenOutput:
        """The output for an event. Its `finish` is STOP_STRING if the text ends the sequence; then the engine must
        end it in the scheduler."""
        self.num_outputs += 1
        if event.admitted_s is not None:
            self.admitted_s, self.replica = event.admitted_s, event.replica
        if event.error is not None:
            self._num_ended += 1
            self.error = self.error or event.error
            return TokenOutput(event.index, event.offset, error=event.error)
        progress = self.progress(event.index)
        finish, matched, text = event.finish, None, ""
        if event.token_id is not None:
            self.num_tokens += 1
            progress.note_token(now_s)
            finish, matched, text = progress.read(self.request, event.finish, event.token_id)
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
        self.error = self.error or error
        return TokenOutput(0, 0, error=error)

    def progress(self, index: int) -> SequenceProgress:
        progress = self._sequences.get(index)
        if progress is None:
            progress = self._sequences[index] = _new_progress(self.request, self.tokenizer)
        return progress

    def _timings(self, progress: SequenceProgress, now_s: float) -> TimingsOutput:
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
