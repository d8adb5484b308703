"""What crosses between head and stages: plans out, results back. Frozen, and complete at birth.

step: one pass of one microbatch through all stages. slice: one sequence's consecutive tokens in a
step. A plan holds everything a stage must know; stages keep no state about sequences but their keys
and values.
"""

from __future__ import annotations

from dataclasses import dataclass

from ppserve.core.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Draw:
    """Draw the token that follows a slice's last token.

    index: which of the request's sequences (part of the random key). num_logprobs: None = none,
    0 = the chosen token's, k = also the k most likely. banned: ids that must not be drawn yet
    (`min_tokens`). prompt_ids and output_ids: the sequence so far, filled only when
    `params.needs_history`.
    """

    params: SamplingParams
    index: int = 0
    num_logprobs: int | None = None
    banned: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Slice:
    """One sequence's consecutive tokens in a step.

    start: position of the first token. block_table: the KV blocks of positions 0 .. start + len(token_ids)
    (logical order; block i holds positions i*block_size ...). draw: None for a chunk that is not a
    prompt's last. targets: when the prompt is scored, the token that follows each position of the slice
    (one shorter than token_ids at the prompt's end); num_prompt_logprobs: alternatives per scored token.
    """

    sequence_id: int
    start: int
    token_ids: tuple[int, ...]
    block_table: tuple[int, ...]
    draw: Draw | None = None
    targets: tuple[int, ...] = ()
    num_prompt_logprobs: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. copies: (source, destination) KV blocks to copy before anything is computed."""

    epoch: int
    step_id: int
    lane: int
    slices: tuple[Slice, ...]
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Rows of hidden states that cross each wire in this step."""
        return sum(len(s.token_ids) for s in self.slices)

    @property
    def phase(self) -> str:
        """`prefill`, `decode` or `mixed`: what the slices happen to be, for metrics only."""
        decodes = sum(len(s.token_ids) == 1 and s.draw is not None for s in self.slices)
        return "decode" if decodes == len(self.slices) else "mixed" if decodes else "prefill"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """logprob: log-probability (natural) of the token; top: (id, logprob), most likely first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Drawn:
    """The token drawn after a slice. token_id None: its logits were not finite."""

    sequence_id: int
    token_id: int | None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probabilities of a slice's `targets`, in order; `start` is the slice's."""

    sequence_id: int
    start: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class StepStamps:
    """When a stage did what in a step: nanoseconds on the stage's monotonic clock.

    planned: plan read from the socket; awaited: began to wait for hidden states (stage 0: = begun);
    received: they were there; begun, ended: compute; sent: handed to the next stage (last: = ended).
    """

    planned: int
    awaited: int
    received: int
    begun: int
    ended: int
    sent: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """One stage's word on one step; every stage sends one for every step. Only the last draws and scores."""

    epoch: int
    step_id: int
    stage: int
    stamps: StepStamps
    bytes_sent: int = 0
    drawn: tuple[Drawn, ...] = ()
    scored: tuple[Scored, ...] = ()
