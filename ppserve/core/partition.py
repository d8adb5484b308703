"""Which blocks go to which stage: the split whose heaviest stage is lightest.

All blocks of a GPT-2 cost the same, the first stage also embeds and the last also runs the LM head, so the
cost of a stage is a constant plus a price per block. Handing out blocks one at a time, each to the stage that
would then cost least, is exact for such costs: it minimises the maximum, then the second largest, and so on.
"""

from __future__ import annotations

from dataclasses import dataclass

from ppserve.core.architecture import Architecture
from ppserve.errors import ConfigError

_FLAG = "--layers"


@dataclass(frozen=True, slots=True)
class Parts:
    """What the parts of a model cost, in one unit of your choice (seconds, bytes, parameters).

    block: one transformer block; embedding: only on the first stage; head: final norm, LM head and
    sampling, only on the last.
    """

    block: float
    embedding: float
    head: float

    def stage_cost(self, stage: int, num_stages: int, num_layers: int) -> float:
        """Cost of a stage that holds `num_layers` blocks."""
        cost = num_layers * self.block
        if stage == 0:
            cost += self.embedding
        if stage == num_stages - 1:
            cost += self.head
        return cost

    def costs(self, split: tuple[int, ...]) -> tuple[float, ...]:
        """Cost of every stage under `split`."""
        return tuple(self.stage_cost(i, len(split), n) for i, n in enumerate(split))


# How many sequences decode together when the parts are measured.
MEASURED_DECODES = 16


@dataclass(frozen=True, slots=True)
class TokenCosts:
    """Seconds per token of each part, measured: of a prompt, and of decoding. Heads cost per prompt what
    one drawn token costs, shared out over the tokens of the chunk that was measured."""

    prefill: Parts
    decode: Parts

    @staticmethod
    def mean(costs: tuple[TokenCosts, ...]) -> TokenCosts:
        """Of what several stages measured."""

        def mean_of(parts: list[Parts]) -> Parts:
            n = len(parts)
            return Parts(
                sum(p.block for p in parts) / n,
                sum(p.embedding for p in parts) / n,
                sum(p.head for p in parts) / n,
            )

        return TokenCosts(mean_of([c.prefill for c in costs]), mean_of([c.decode for c in costs]))


def decode_parts(arch: Architecture) -> Parts:
    """Weights read by a decode step, in parameters: what such a step costs while memory is the limit.

    The head reads its whole matrix (5.45 blocks of GPT-2 124M); the embedding only gathers two rows.
    """
    return Parts(arch.block_params, 2 * arch.width, arch.head_params)


def prefill_parts(arch: Architecture, prompt_tokens: int) -> Parts:
    """Multiplications per prompt token; the head runs for one token of the prompt only."""
    return Parts(arch.block_params, 2 * arch.width, arch.head_params / prompt_tokens)


def mixed_parts(prefill: Parts, decode: Parts, expect_prompt: int, expect_new: int) -> Parts:
    """Cost of one expected request: `prefill` per prompt token and `decode` per generated token."""

    def total(per_prompt_token: float, per_new_token: float) -> float:
        return expect_prompt * per_prompt_token + expect_new * per_new_token

    return Parts(
        total(prefill.block, decode.block),
        total(prefill.embedding, decode.embedding),
        total(prefill.head, decode.head),
    )


def split_by_weight(arch: Architecture, num_stages: int) -> tuple[int, ...]:
    """Blocks per stage, balanced by the weights that a decode step reads. Raises ConfigError."""
    return split_by_cost(decode_parts(arch), arch.num_layers, num_stages)


def split_by_cost(parts: Parts, num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Blocks per stage, at least one each, with the lightest possible heaviest stage. Raises ConfigError.

    Among equals the earlier stage gets the block.
    """
    _check_room(num_layers, num_stages)
    split = [1] * num_stages
    for _ in range(num_layers - num_stages):
        costs = [parts.stage_cost(i, num_stages, n + 1) for i, n in enumerate(split)]
        split[costs.index(min(costs))] += 1
    return tuple(split)


def check_split(split: tuple[int, ...], arch: Architecture, num_stages: int) -> None:
    """Raises ConfigError, naming --layers, unless `split` deals out every block to `num_stages` stages."""
    _check_room(arch.num_layers, num_stages)
    written = ",".join(map(str, split))
    if len(split) != num_stages:
        raise ConfigError(_FLAG, f"{written} names {_count(len(split), 'stage')}, but {num_stages} are running")
    for stage, n in enumerate(split):
        if n < 1:
            raise ConfigError(_FLAG, f"{written} gives {n} blocks to stage {stage}; each needs at least one")
    if sum(split) != arch.num_layers:
        raise ConfigError(_FLAG, f"{written} adds up to {sum(split)} blocks, but the model has {arch.num_layers}")


def balance(costs: tuple[float, ...]) -> float:
    """Efficiency of a full pipeline with these stage costs: mean over maximum, 1.0 = no stage ever waits."""
    return sum(costs) / (len(costs) * max(costs))


def _check_room(num_layers: int, num_stages: int) -> None:
    if num_stages < 1:
        raise ConfigError(_FLAG, f"{num_stages} stages: at least one is needed")
    if num_stages > num_layers:
        blocks = _count(num_layers, "block")
        raise ConfigError(_FLAG, f"{num_stages} stages cannot share {blocks}; each needs at least one")


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
