"""The open requests: events become outputs, tokens become text, and streams get them at the end of a turn.

Every protocol under `head/api` makes its messages from `TokenOutput`s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from ppserve.answers import Timings
from ppserve.core.plan import TokenLogprobs
from ppserve.core.request import FinishReason, Request
from ppserve.core.scheduling.sequence import SequenceEvent, TextRule
from ppserve.core.scheduling.token_filter import TokenFilter
from ppserve.errors import InvalidRequest, RequestError, Violation
from ppserve.tokenizer import Detokenizer, Tokenizer


class TokenOutput(Struct, frozen=True):
    """A token of one sequence, its end, or both."""

    index: int  # of the sequence
    offset: int  # the token's index among generated tokens; without a token, their number
    token_id: int | None = None  # None if the sequence ends without a token
    text: str = ""  # what the detokenizer released
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of prompt tokens 1, 2, ..., in the request's first output
    finish: FinishReason | None = None
    matched: int | str | None = None  # the token or string that ended the sequence
    error: RequestError | None = None  # ends the whole request
    cached_tokens: int = 0  # of the prompt; the same in all outputs of a sequence
    timings: Timings | None = None  # with `finish`


Sink = Callable[[Sequence[TokenOutput]], None]
"""Takes a request's outputs of one turn, in the thread in which `HandOver` runs it. It must return at once."""


ReadToken = tuple[FinishReason | None, int | str | None, str]
"""Why the token ended its sequence, the token or string that did, and its text."""


class SequenceProgress:
    """One sequence's text so far, and its tokens' times on the head's clock."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        stop = request.stop
        self._includes_stop = stop.include_stop
        skips_special = request.output.skip_special_tokens
        self._detokenizer = Detokenizer(tokenizer, stop.stop, stop.include_stop, stop.min_tokens, skips_special)
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.gap_s: float | None = None  # between its last two tokens
        self.num_tokens = 0
        self.readings: deque[ReadToken] = deque()  # of tokens whose events are not outputs yet

    def note_token(self, now_s: float) -> None:
        self.num_tokens += 1
        self.gap_s = None if self.last_token_s is None else now_s - self.last_token_s
        self.first_token_s = self.first_token_s or now_s
        self.last_token_s = now_s

    def read(self, finish: FinishReason | None, token_id: int) -> ReadToken:
        """Detokenize a token. finish: why it ends the sequence; None if only its text could."""
        matched = token_id if finish in (FinishReason.EOS, FinishReason.STOP_TOKEN) else None
        is_text = matched is None or (finish is FinishReason.STOP_TOKEN and self._includes_stop)
        if not is_text:
            return finish, matched, ""
        piece = self._detokenizer.push(token_id)
        if piece.matched is not None:
            return FinishReason.STOP_STRING, piece.matched, piece.text
        return finish, matched, piece.text

    def end(self) -> str:
        """Return the text that the detokenizer held back."""
        return self._detokenizer.finish()


class OpenRequest:
    """A request until all its sequences end. Once it is submitted, only the engine's thread uses it."""

    def __init__(
        self,
        request: Request,
        sink: Sink,
        tokenizer: Tokenizer,
        eos_ids: tuple[int, ...] = (),
        token_filter: TokenFilter | None = None,
    ) -> None:
        """Open a request, and detokenize what its caller holds of the answer, if it resumes one.

        token_filter: the rule that its answers must obey.
        Raises InvalidRequest if tokens follow the end of what the caller holds.
        """
        self.request = request
        self.token_filter = token_filter
        self.sink = sink
        self.arrived_s = 0.0
        self.admitted_s: float | None = None
        self.replica: int | None = None  # the one that computed it last
        self.error: RequestError | None = None  # the first error of a sequence, which ends the request
        self.num_outputs = 0
        self.num_tokens = 0  # of all sequences
        self._tokenizer = tokenizer
        self._sequences: dict[int, SequenceProgress] = {}
        self._num_ended = 0
        self._busy_s: Callable[[], tuple[float, ...]] = tuple
        self._busy_at_arrival_s: tuple[float, ...] = ()
        # Whether, and with what, the tokens end that the caller of a resumed answer holds.
        self._held_end: tuple[FinishReason | None, int | str | None] = None, None
        self.held_text = ""
        """The text of the tokens that the caller of a resumed answer holds."""
        self._read_held(request.resume_ids, eos_ids)

    def _read_held(self, token_ids: Sequence[int], eos_ids: tuple[int, ...]) -> None:
        progress = self.progress(self.request.resume_index or 0)
        for count, token_id in enumerate(token_ids, 1):
            finish, matched, text = progress.read(self.request.end_after(count, token_id, eos_ids), token_id)
            self._held_end = finish, matched
            self.held_text += text
            if finish is not None and count < len(token_ids):
                problem = f"token {count - 1} of these ends the answer: nothing can follow it"
                raise InvalidRequest([Violation("resume.generated_token_ids", problem)])

    @property
    def is_complete(self) -> bool:
        return self._num_ended >= self.request.num_sequences

    def begin(self, now_s: float, busy_s: Callable[[], tuple[float, ...]]) -> TokenOutput | None:
        """Note the arrival. Return the answer's end if the caller holds it already; None if there is more to come.

        busy_s: returns how many seconds each stage has computed until now.
        """
        self.arrived_s = now_s
        if self.request.output.timings:
            self._busy_s, self._busy_at_arrival_s = busy_s, busy_s()
        finish, matched = self._held_end
        if finish is None:
            return None
        self._num_ended += 1
        index = self.request.resume_index or 0
        count = len(self.request.resume_ids)
        timings = self._timings(self.progress(index), now_s)
        return TokenOutput(index, count, finish=finish, matched=matched, timings=timings)

    def output(self, event: SequenceEvent, now_s: float) -> TokenOutput:
        """Return what an event brings the caller."""
        self.num_outputs += 1
        if event.admitted_s is not None:
            self.admitted_s = event.admitted_s
            self.replica = event.replica
        if event.error is not None:
            self._num_ended += 1
            self.error = self.error or event.error
            return TokenOutput(event.index, event.offset, error=event.error)
        progress = self.progress(event.index)
        finish, matched, text = self._read(event, progress, now_s)
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

    def _read(self, event: SequenceEvent, progress: SequenceProgress, now_s: float) -> ReadToken:
        """Call `SequenceProgress.read`, and add the held-back text at the end."""
        finish, matched, text = event.finish, None, ""
        if event.token_id is not None:
            self.num_tokens += 1
            progress.note_token(now_s)
            if progress.readings:
                finish, matched, text = progress.readings.popleft()
            else:
                finish, matched, text = progress.read(event.finish, event.token_id)
            assert finish is event.finish, "the event is the end"
        if finish is not None:
            self._num_ended += 1
            text += progress.end()
        return finish, matched, text

    @property
    def text_rule(self) -> TextRule | None:
        """Decides whether a token's text ends its answer; None if no text can."""
        return self._end_of_text if self.request.stop.stop else None

    def _end_of_text(self, index: int, token_id: int, finish: FinishReason | None) -> FinishReason | None:
        progress = self.progress(index)
        progress.readings.append(progress.read(finish, token_id))
        return progress.readings[-1][0]

    def fail(self, error: RequestError) -> TokenOutput:
        """End the whole request with `error`."""
        self._num_ended = self.request.num_sequences
        self.error = self.error or error
        return TokenOutput(0, 0, error=error)

    def progress(self, index: int) -> SequenceProgress:
        progress = self._sequences.get(index)
        if progress is None:
            progress = self._sequences[index] = SequenceProgress(self.request, self._tokenizer)
        return progress

    def _timings(self, progress: SequenceProgress, now_s: float) -> Timings:
        admitted_s = self.admitted_s if self.admitted_s is not None else now_s
        first_s = progress.first_token_s or now_s
        last_s = progress.last_token_s or now_s
        return Timings(
            queue_s=admitted_s - self.arrived_s,
            prefill_s=max(0.0, first_s - admitted_s),
            ttft_s=first_s - self.arrived_s,
            decode_s=last_s - first_s,
            stage_busy_s=tuple(a - b for a, b in zip(self._busy_s(), self._busy_at_arrival_s, strict=True)),
        )


OnOutput = Callable[[OpenRequest, TokenOutput, float], None]
"""Is called with the time when a stream gets a token, an end, or both."""

HandOver = Callable[[Callable[[], None]], object]
"""Runs a function in the thread of the sinks; `loop.call_soon_threadsafe` is one."""


class OpenStreams:
    """The streams of all open requests. The scheduler's events become outputs, delivered together.

    Tokens become text after the turn's plans were sent, as stages may wait for these. Where a stop string may end
    a sequence they do at once, in the scheduler's call of `OpenRequest.text_rule`: the next plan depends on it.
    """

    def __init__(self, on_output: OnOutput, hand_over: HandOver) -> None:
        self._on_output = on_output
        self._hand_over = hand_over
        self._open: dict[str, OpenRequest] = {}
        self._events: list[SequenceEvent] = []  # not published yet
        self._outputs: dict[Sink, list[TokenOutput]] = {}  # not delivered yet

    def __len__(self) -> int:
        return len(self._open)

    def open(self, opened: OpenRequest) -> None:
        self._open[opened.request.id] = opened

    def add_events(self, events: Iterable[SequenceEvent], now_s: float) -> None:
        """Take events of this turn, in their order."""
        for event in events:
            self._events.append(event)
            opened = self._open.get(event.request_id)
            if opened is None or event.is_terminal:
                self.publish(now_s)

    def publish(self, now_s: float) -> None:
        """Turn all events so far into outputs."""
        events, self._events = self._events, []
        for event in events:
            self._publish_event(event, now_s)

    def _publish_event(self, event: SequenceEvent, now_s: float) -> None:
        opened = self._open.get(event.request_id)
        if opened is None:
            return
        self.add_output(opened, opened.output(event, now_s), now_s)
        if opened.is_complete:
            del self._open[event.request_id]

    def add_output(self, opened: OpenRequest, output: TokenOutput, now_s: float) -> None:
        self._outputs.setdefault(opened.sink, []).append(output)
        self._on_output(opened, output, now_s)

    def deliver(self) -> None:
        """Hand this turn's outputs of all streams over in one call."""
        if self._outputs:
            outputs, self._outputs = self._outputs, {}
            self._hand_over(lambda: _push(outputs))

    def fail_all(self, error: RequestError, now_s: float) -> None:
        """End every stream. Unpublished events are lost: resuming computes them again."""
        opened, self._open = self._open, {}
        for each in opened.values():
            self.add_output(each, each.fail(error), now_s)
        self.deliver()


def _push(outputs: dict[Sink, list[TokenOutput]]) -> None:
    for sink, of_sink in outputs.items():
        sink(of_sink)
