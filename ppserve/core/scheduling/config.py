"""What the operator decides about scheduling, resolved and frozen."""

from __future__ import annotations

from dataclasses import dataclass

MAX_PROMPT_TOKENS_PER_STEP = 512


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """microbatches: steps in flight, None = as many as stages. max_num_seqs: sequences running at once.
    max_queue and max_queue_tokens: what may wait, in requests and in tokens (prompt + max_tokens, times
    n). prefill_chunk: prompt tokens per step, None = automatic, up to max_auto_chunk. eos_id: None when the
    model has none.
    aging_s: the waiting time that is worth one priority class.
    """

    num_stages: int
    microbatches: int | None = None
    max_num_seqs: int = 256
    max_queue: int = 1024
    max_queue_tokens: int = 1_048_576
    max_model_len: int = 1024
    block_size: int = 16
    prefill_chunk: int | None = None
    max_auto_chunk: int = MAX_PROMPT_TOKENS_PER_STEP
    prefix_cache: bool = True
    eos_id: int | None = None
    aging_s: float = 10.0

    @property
    def max_microbatches(self) -> int:
        """The most steps that can ever be in flight: one more than stages hides the tokens' way back."""
        return max(self.num_stages + 1, self.microbatches or 1)

    @property
    def max_step_tokens(self) -> int:
        """The most rows that a step can have: every sequence decoding, and as much prompt as is allowed."""
        return self.max_num_seqs + (self.prefill_chunk or self.max_auto_chunk)
