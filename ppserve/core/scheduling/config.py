"""The operator's choices about scheduling, resolved and frozen."""

from __future__ import annotations

from dataclasses import dataclass

MAX_PROMPT_TOKENS_PER_STEP = 512


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """microbatches: steps in flight, None = chosen while serving. max_num_seqs: sequences running at once.
    max_queue and max_queue_tokens: how many requests, and how many of their tokens (prompt + max_tokens, times n),
    may wait. prefill_chunk: prompt tokens per step, None = automatic, up to max_auto_chunk. eos_id: None where the
    model has none. speculate: at most so many draft tokens in every slice that decodes, 0 = none, None = as many
    as pay by the cost model. per_caller:
    callers do not share prefixes, because what is found in the cache tells what others have asked. runs_ahead: one
    rank computes all of the model, so a step may take the tokens that the one before it draws. replica: whose
    scheduler it is; all else is the same for every replica.
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
    per_caller: bool = False
    eos_id: int | None = None
    speculate: int | None = 0
    runs_ahead: bool = False
    replica: int = 0

    @property
    def max_microbatches(self) -> int:
        """The most steps of known tokens that may ever be in flight. One more than stages hides the return of
        tokens."""
        return max(self.num_stages + 1, self.microbatches or 1)

    @property
    def max_step_tokens(self) -> int:
        """The most rows that a step can have: one per sequence, and a chunk of prompt tokens."""
        return self.max_num_seqs + (self.prefill_chunk or self.max_auto_chunk)
