"""The load that an operator expects (`--expect`), and the step that a busy server then computes all the time."""

from __future__ import annotations

from dataclasses import dataclass

from ppserve.core.plan import Draw, Slice, StepPlan
from ppserve.core.request import SamplingParams

BUSY_DECODES = 16
"""Sequences that decode in a step, where only the balance of stages matters."""
BLOCK_SIZE = 16
"""Of the KV blocks in the step."""
_MAX_PROMPT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class ExpectedStep:
    """A step of the expected load."""

    plan: StepPlan
    new_tokens: float
    """Tokens of answers that such a step brings on average; less than it decodes where prompts are long."""

    @property
    def drawn_share(self) -> float:
        """How many of its draws there are on average, 0 to 1."""
        return self.new_tokens / sum(piece.num_draws for piece in self.plan.slices)


@dataclass(frozen=True, slots=True)
class ExpectedWorkload:
    """A number of callers, each with one request at a time. prompt, new: tokens of a typical request."""

    prompt: int
    new: int
    callers: int = BUSY_DECODES

    def decodes(self, world_size: int, num_tensor: int) -> int:
        """Sequences in a step where so many ranks form stages and replicas of `num_tensor` ranks each.

        All shapes with the same number of tensor ranks have steps of the same size: callers are divided among
        replicas, and those of a replica among as many microbatches as it has stages.
        """
        return max(1, round(self.callers * num_tensor / world_size))

    def step(self, max_positions: int, num_decodes: int = BUSY_DECODES) -> ExpectedStep:
        """Sequences half way through their answers, and the prompt tokens that new requests bring meanwhile.

        Fewer sequences decode where those are too many prompt tokens for one step. Long prompts with short answers
        have less than one decode in such a step: then the step has one, and `new_tokens` is below 1.
        """
        prompt = max(1, min(self.prompt, max_positions - 1))
        context = min(prompt + self.new // 2, max_positions - 1)
        num_prompt_tokens = min(num_decodes * prompt / self.new, _MAX_PROMPT_TOKENS)
        new_tokens = num_prompt_tokens * self.new / prompt
        pieces = [(context, 1)] * min(num_decodes, max(1, round(new_tokens)))
        left = round(num_prompt_tokens)
        while left:
            num_tokens = min(left, prompt)
            pieces.append(((prompt - num_tokens) // 2, num_tokens))
            left -= num_tokens
        return ExpectedStep(_plan(pieces), new_tokens)


def _plan(pieces: list[tuple[int, int]]) -> StepPlan:
    """A step of one slice per (start, tokens), each with blocks of its own; single tokens are drawn from."""
    slices, num_blocks = [], 0
    for number, (start, num_tokens) in enumerate(pieces):
        table = tuple(range(num_blocks, num_blocks - (-(start + num_tokens) // BLOCK_SIZE)))
        num_blocks += len(table)
        draw = Draw(SamplingParams(seed=number, temperature=0.8)) if num_tokens == 1 else None
        slices.append(Slice(number, start, (1,) * num_tokens, table, draw))
    return StepPlan(0, 0, 0, tuple(slices))
