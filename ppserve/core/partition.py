"""Which part of the model goes to which stage: the split whose heaviest stage is lightest.

All blocks of a GPT-2 cost the same, the first stage also embeds and the last also runs the LM head. Stages are
cut between blocks or, where that balances them better, between a block's attention and its MLP, a third and two
thirds of its weights: the hidden states that cross are equally many.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from ppserve.core.architecture import Architecture, Split, StageLayout, stage_layouts, written
from ppserve.errors import ConfigError

_FLAG = "--layers"
# A block is cut only where that makes the heaviest stage lighter by more than this share.
_WORTH_A_CUT = 0.01
# Of more blocks than these one is too little to be worth cutting, and the search too long.
_MOST_CUT = 128


@dataclass(frozen=True, slots=True)
class Parts:
    """What the parts of a model cost, in one unit of your choice (seconds, bytes, parameters).

    attention, mlp: of one transformer block, each with its norm; embedding: only on the first stage; head:
    final norm, LM head and sampling, only on the last.
    """

    attention: float
    mlp: float
    embedding: float
    head: float

    @property
    def block(self) -> float:
        return self.attention + self.mlp

    def stage_cost(self, layout: StageLayout) -> float:
        """Cost of a stage."""
        cost = len(layout.attentions) * self.attention + len(layout.mlps) * self.mlp
        if layout.is_first:
            cost += self.embedding
        if layout.is_last:
            cost += self.head
        return cost

    def costs(self, split: Split) -> tuple[float, ...]:
        """Cost of every stage under `split`."""
        return tuple(map(self.stage_cost, stage_layouts(split)))


def mean(parts: tuple[Parts, ...]) -> Parts:
    """Of what several stages measured."""
    columns = zip(*((p.attention, p.mlp, p.embedding, p.head) for p in parts), strict=True)
    return Parts(*map(fmean, columns))


def decode_parts(arch: Architecture) -> Parts:
    """Weights read by a decode step, in parameters: what such a step costs while memory is the limit.

    The head reads its whole matrix (5.45 blocks of GPT-2 124M); the embedding only gathers two rows.
    """
    return Parts(arch.attention_params, arch.mlp_params, 2 * arch.width, arch.head_params)


def prefill_parts(arch: Architecture, prompt_tokens: int) -> Parts:
    """Multiplications per prompt token; the head runs for one token of the prompt only."""
    return Parts(arch.attention_params, arch.mlp_params, 2 * arch.width, arch.head_params / prompt_tokens)


def mixed_parts(prefill: Parts, decode: Parts, expect_prompt: int, expect_new: int) -> Parts:
    """Cost of one expected request: `prefill` per prompt token and `decode` per generated token."""

    def total(per_prompt_token: float, per_new_token: float) -> float:
        return expect_prompt * per_prompt_token + expect_new * per_new_token

    return Parts(
        total(prefill.attention, decode.attention),
        total(prefill.mlp, decode.mlp),
        total(prefill.embedding, decode.embedding),
        total(prefill.head, decode.head),
    )


def split_by_weight(arch: Architecture, num_stages: int) -> Split:
    """Blocks per stage, balanced by the weights that a decode step reads. Raises ConfigError."""
    return split_by_cost(decode_parts(arch), arch.num_layers, num_stages)


def split_by_cost(parts: Parts, num_layers: int, num_stages: int) -> Split:
    """Blocks per stage, at least one each, with the lightest possible heaviest stage. Raises ConfigError.

    Among equals as few cut blocks as possible; of whole ones the earlier stage gets one more.
    """
    _check_room(num_layers, num_stages)
    whole = _whole_blocks(parts, num_layers, num_stages)
    if num_layers > _MOST_CUT:
        return whole
    heaviest = max(parts.costs(whole))
    cut = _cut_blocks(parts, num_layers, num_stages, heaviest)
    return cut if max(parts.costs(cut)) < (1 - _WORTH_A_CUT) * heaviest else whole


def _whole_blocks(parts: Parts, num_layers: int, num_stages: int) -> Split:
    """One block at a time to the stage that costs least, which is exact as all blocks cost the same."""
    split = [1] * num_stages
    costs = list(parts.costs(tuple(split)))
    for _ in range(num_layers - num_stages):
        lightest = costs.index(min(costs))
        split[lightest] += 1
        costs[lightest] += parts.block
    return tuple(split)


def _cut_blocks(parts: Parts, num_layers: int, num_stages: int, limit: float) -> Split:
    """The lightest heaviest stage over all cuts between sublayers, where `limit` is known to be reachable.

    From the last stage to the first: for every sublayer where a stage may begin, the best that can be made of
    what follows, as (heaviest stage, cut blocks, sum of squares, sublayers of each stage). Costs are shares of
    the limit.
    """
    ends = 2 * num_layers
    # Of a stage in the middle: embedding and head come on top.
    upto = [parts.stage_cost(StageLayout(1, 3, 0, size)) / limit for size in range(ends + 1)]
    best: dict[int, tuple[float, int, float, tuple[int, ...]]] = {ends: (0.0, 0, 0.0, ())}
    for stage in reversed(range(num_stages)):
        beside_blocks = parts.stage_cost(StageLayout(stage, num_stages, 0, 0)) / limit
        behind, best = best, {}
        for begin in [0] if stage == 0 else range(2 * stage, ends - 1):
            choices = []
            for end in range(begin + 2, ends + 1):
                cost = round(upto[end] - upto[begin] + beside_blocks, 9)
                if cost > 1:
                    break
                if end in behind:
                    heaviest, cuts, squares, sizes = behind[end]
                    heaviest, cuts, squares = max(cost, heaviest), cuts + end % 2, squares + cost * cost
                    choices.append((heaviest, cuts, squares, (end - begin, *sizes)))
            if choices:
                best[begin] = min(choices)
    return tuple(size / 2 for size in best[0][3])


def check_split(split: Split, arch: Architecture, num_stages: int) -> None:
    """Raises ConfigError, naming --layers, unless `split` deals out every block to `num_stages` stages."""
    _check_room(arch.num_layers, num_stages)
    asked = written(split)
    if len(split) != num_stages:
        raise ConfigError(_FLAG, f"{asked} names {_count(len(split), 'stage')}, but {num_stages} are running")
    for stage, n in enumerate(split):
        if n < 1:
            raise ConfigError(_FLAG, f"{asked} gives {n:g} blocks to stage {stage}; each needs at least one")
        if (2 * n) % 1:
            raise ConfigError(_FLAG, f"{asked} gives {n:g} blocks to stage {stage}; blocks are cut in halves only")
    if sum(split) != arch.num_layers:
        raise ConfigError(_FLAG, f"{asked} adds up to {sum(split):g} blocks, but the model has {arch.num_layers}")


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
