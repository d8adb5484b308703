"""The engine's side of one request: its events become text, stop strings end it, its times are kept.

Owned by the engine's thread. What a client sees of it is made under `head/api`, in the thread of the streams.
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
class _Progress:
    """One sequence's text and times (seconds, head's clock)."""

    detokenizer: Detokenizer | None
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_tokens: int = 0


@dataclass(slots=True)
class OpenRequest:
    """Turns one request's events into outputs, until each of its sequences has ended.

    busy_s: seconds that every stage has computed so far, for callers who want timings.
    """

    request: Request
    sink: Sink
    tokenizer: Tokenizer | None
    arrived_s: float
    busy_s: Callable[[], tuple[float, ...]]
    admitted_s: float | None = None
    _sequences: dict[int, _Progress] = field(default_factory=dict)
    _num_ended: int = 0
    _busy_at_arrival_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.request.output.timings:
            self._busy_at_arrival_s = self.busy_s()

    @property
    def is_complete(self) -> bool:
        return self._num_ended >= self.request.num_sequences

    def resume(self, eos_id: int | None, now_s: float) -> TokenOutput | None:
        """Reads the tokens that the caller holds already; what comes next continues their text.

        Returns the answer's end when those tokens include it: there is nothing to compute, and its text was
        delivered with them. Raises InvalidRequest when tokens follow the end, which no stream has brought.
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
        """What the client hears of `event`. Its `finish` is STOP_STRING where the text ends the sequence
        before the scheduler would: the engine then tells the scheduler."""
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

    def fail(self, error: RequestError) -> TokenOutput:
        """All of it ends with `error`, wherever it stands."""
        self._num_ended = self.request.num_sequences
        return TokenOutput(0, 0, error=error)

    def _progress(self, index: int) -> _Progress:
        progress = self._sequences.get(index)
        if progress is None:
            progress = self._sequences[index] = _Progress(self._new_detokenizer())
        return progress

    def _new_detokenizer(self) -> Detokenizer | None:
        if self.tokenizer is None:
            return None
        stop = self.request.stop
        return Detokenizer(self.tokenizer, stop.stop, stop.include_stop, stop.min_tokens)

    def _read(
        self, progress: _Progress, finish: FinishReason | None, token_id: int
    ) -> tuple[FinishReason | None, int | str | None, str]:
        """The text that a token completes, and whether it ends the sequence: (finish, matched, text).

        finish: how the token ends it by itself, without regard to text.
        """
        ends_by_token = finish in (FinishReason.EOS, FinishReason.STOP_TOKEN)
        if progress.detokenizer is None:
            return finish, token_id if ends_by_token else None, ""
        if ends_by_token and not (finish is FinishReason.STOP_TOKEN and self.request.stop.include_stop):
            return finish, token_id, ""
        piece = progress.detokenizer.push(token_id)
        if piece.matched is not None:
            return FinishReason.STOP_STRING, piece.matched, piece.text
        return finish, token_id if ends_by_token else None, piece.text

    def _timings(self, progress: _Progress, now_s: float) -> TimingsOutput:
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
        """Of one sequence: when its first and its last token came, and how many there were."""
        progress = self._sequences.get(index)
        if progress is None:
            return None, None, 0
        return progress.first_token_s, progress.last_token_s, progress.num_tokens
