"""A generation request: frozen, with every default resolved."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from msgspec import Struct


class FinishReason(StrEnum):
    """Why a sequence ended; the names are those of the proto's `FinishReason`."""

    EOS = "EOS"
    STOP_TOKEN = "STOP_TOKEN"
    STOP_STRING = "STOP_STRING"
    MAX_TOKENS = "MAX_TOKENS"
    CONTEXT_LENGTH = "CONTEXT_LENGTH"
    CANCELLED = "CANCELLED"
    DEADLINE = "DEADLINE"


class SamplingParams(Struct, frozen=True, omit_defaults=True):
    """How the next token is drawn from its logits.

    They are applied in this order, as Hugging Face does: logit_bias; repetition, frequency and presence penalties;
    banned ids (`min_tokens`) and those that a token filter forbids; temperature; top_k; top_p; min_p. A
    `temperature` of 0 is greedy. `top_k` 0, `top_p` 1.0 and `min_p` 0.0 mean no limit.
    """

    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def needs_history(self) -> bool:
        """Whether a draw needs the earlier tokens in addition to the logits, because there is a penalty."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)


class StopConditions(Struct, frozen=True, omit_defaults=True):
    """What ends a sequence."""

    max_tokens: int
    """The most tokens that may be generated. It has been lowered if prompt and answer would not fit the
    context."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False


class OutputOptions(Struct, frozen=True, omit_defaults=True):
    """What is returned in addition to the text."""

    echo: bool = False
    logprobs: int | None = None
    """None = no log-probabilities, 0 = the drawn token's, k = also those of the k most likely tokens."""
    prompt_logprobs: int | None = None
    token_ids: bool = False
    timings: bool = False
    stream_interval: int = 1
    skip_special_tokens: bool = True
    """Whether the text leaves out the names of special tokens."""


@dataclass(frozen=True, slots=True)
class Request:
    """One generation request."""

    id: str
    prompt_ids: tuple[int, ...]
    """The prompt has at least one token."""
    stop: StopConditions
    sampling: SamplingParams = field(default_factory=SamplingParams)
    output: OutputOptions = field(default_factory=OutputOptions)
    num_sequences: int = 1
    """The number of answers (`n` in the interface)."""
    resume_index: int | None = None
    """The index of the sequence that is resumed; None if none is."""
    resume_ids: tuple[int, ...] = ()
    """The tokens of the resumed sequence that the caller already has."""
    length_end: FinishReason = FinishReason.MAX_TOKENS
    """Why an answer of max_tokens tokens ends: CONTEXT_LENGTH if the context has room for no more."""
    priority: int = 0
    """Requests of higher priority are admitted earlier. (Callers send the negative of this number.)"""
    caller: str = ""
    """The digest of the API key, or the peer's address. Fairness counts the tokens of each caller."""
    deadline_s: float | None = None
    """The deadline in seconds on the head's monotonic clock; None: there is none."""

    @property
    def indices(self) -> range:
        """The indices of the sequences that are generated."""
        resumed = self.resume_index
        return range(self.num_sequences) if resumed is None else range(resumed, resumed + 1)

    def end_after(self, num_generated: int, token_id: int, eos_ids: tuple[int, ...]) -> FinishReason | None:
        """Return why an answer ends with its latest token; None if it does not. num_generated: the number of its
        tokens, the latest included."""
        stop = self.stop
        if num_generated >= stop.min_tokens:
            # Before min_tokens, these tokens are never drawn. If a resumed answer already has one, it does not end
            # it.
            if token_id in eos_ids and not stop.ignore_eos:
                return FinishReason.EOS
            if token_id in stop.stop_token_ids:
                return FinishReason.STOP_TOKEN
        return self.length_end if num_generated >= stop.max_tokens else None

    def banned(self, eos_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens that would end an answer before it has `min_tokens`."""
        if not self.stop.min_tokens:
            return ()
        banned = set(self.stop.stop_token_ids)
        if not self.stop.ignore_eos:
            banned.update(eos_ids)
        return tuple(sorted(banned))
