"""The operator's choices about scheduling, resolved and frozen."""

from __future__ import annotations

from dataclasses import dataclass

MAX_PROMPT_TOKENS_PER_STEP = 512


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The choices for the scheduler of one replica. All but `replica` are the same for every replica."""

    num_stages: int
    microbatches: int | None = None  # slots for steps in flight; None = chosen while serving
    max_num_seqs: int = 256  # sequences running at once
    max_queue: int = 1024  # requests waiting
    max_queue_tokens: int = 1_048_576  # of all requests waiting; each counts n * (prompt + max_tokens)
    max_model_len: int = 1024
    block_size: int = 16
    prefill_chunk: int | None = None  # prompt tokens per step; None = automatic
    max_auto_chunk: int = MAX_PROMPT_TOKENS_PER_STEP
    prefix_cache: bool = True
    per_caller: bool = False  # callers share no cached prefixes
    eos_ids: tuple[int, ...] = ()
    speculate: int | None = 0  # draft tokens in every slice that decodes; None = as many as pay
    runs_ahead: bool = False  # the next step may be sent before its tokens are drawn (`slots`)
    replica: int = 0

    @property
    def max_step_tokens(self) -> int:
        """The greatest number of rows that a step can have: one per sequence, and a chunk of prompt tokens."""
        return self.max_num_seqs + (self.prefill_chunk or self.max_auto_chunk)
