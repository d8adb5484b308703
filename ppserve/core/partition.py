"""Which part of the model goes to which stage: the split whose heaviest stage is lightest.

All layers of a GPT-2 cost the same, and the last stage also runs the LM head. Stages are cut between layers or,
where that balances them better, between a layer's attention and its MLP, a third and two thirds of its weights:
either way the same hidden states cross.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from statistics import fmean

from ppserve.core.architecture import Architecture, Split, StageLayout, stage_layouts, sublayer_params
from ppserve.core.figures import counted
from ppserve.errors import ConfigError

_FLAG = "--layers"
# A layer is cut only where that makes the heaviest stage lighter by more than this share.
_WORTH_A_CUT = 0.01
# With more layers than these, half a layer is too little to be worth a cut, and the search takes too long.
_MOST_CUT = 128


@dataclass(frozen=True, slots=True)
class PartCosts:
    """What the parts of a model cost in a step, in one unit of your choice (seconds, bytes, parameters).

    attention, mlp: of one layer, each with its norm. overhead: on every stage, embedding a few rows included.
    head: final norm, LM head and sampling, only on the last stage.
    """

    attention: float
    mlp: float
    overhead: float
    head: float

    @property
    def layer(self) -> float:
        return self.attention + self.mlp

    def stage_cost(self, layout: StageLayout) -> float:
        layers = len(layout.attentions) * self.attention + len(layout.mlps) * self.mlp
        return layers + self.overhead + layout.is_last * self.head

    def costs(self, split: Split) -> tuple[float, ...]:
        return tuple(map(self.stage_cost, stage_layouts(split)))


def mean(parts: tuple[PartCosts, ...]) -> PartCosts:
    """The mean of what several stages measured."""
    return PartCosts(*map(fmean, zip(*map(astuple, parts), strict=True)))


def decode_parts(arch: Architecture) -> PartCosts:
    """Weights read by a decode step, in parameters: what such a step costs while memory is the limit.

    The head reads its whole matrix (5.45 layers of GPT-2 124M); the embedding gathers two rows, next to nothing.
    """
    attention, mlp = (sublayer_params(arch, StageLayout(0, 1, first, 1)) for first in (0, 1))
    return PartCosts(attention, mlp, 0.0, arch.head_params)


def prefill_parts(arch: Architecture, prompt_tokens: int) -> PartCosts:
    """Multiplications per prompt token; the head runs for one token of the prompt only."""
    return replace(decode_parts(arch), head=arch.head_params / prompt_tokens)


def mixed_parts(prefill: PartCosts, decode: PartCosts, expect_prompt: int, expect_new: int) -> PartCosts:
    """Cost of one expected request: `prefill` per prompt token and `decode` per generated token."""
    per_token = zip(astuple(prefill), astuple(decode), strict=True)
    return PartCosts(*(expect_prompt * prompt + expect_new * new for prompt, new in per_token))


def split_by_weight(arch: Architecture, num_stages: int) -> Split:
    """The split balanced by the weights that a decode step reads. Raises ConfigError."""
    return split_by_cost(decode_parts(arch), arch.num_layers, num_stages)


def split_by_cost(parts: PartCosts, num_layers: int, num_stages: int) -> Split:
    """The split, of at least one layer each, whose heaviest stage is lightest. Raises ConfigError.

    Among equals the one that cuts fewest layers; of whole layers the earlier stage gets one more.
    """
    _check_room(num_layers, num_stages)
    whole = _whole_layers(parts, num_layers, num_stages)
    if num_layers > _MOST_CUT:
        return whole
    heaviest = max(parts.costs(whole))
    cut = _cut_layers(parts, num_layers, num_stages, heaviest)
    return cut if max(parts.costs(cut)) < (1 - _WORTH_A_CUT) * heaviest else whole


def _whole_layers(parts: PartCosts, num_layers: int, num_stages: int) -> Split:
    """One layer at a time to the stage that costs least, which is exact as all layers cost the same."""
    sublayers = [2] * num_stages
    costs = list(parts.costs(Split(tuple(sublayers))))
    for _ in range(num_layers - num_stages):
        lightest = costs.index(min(costs))
        sublayers[lightest] += 2
        costs[lightest] += parts.layer
    return Split(tuple(sublayers))


def _cut_layers(parts: PartCosts, num_layers: int, num_stages: int, limit: float) -> Split:
    """The split, over all cuts between sublayers, whose heaviest stage is lightest; at most `limit` is possible.

    Dynamic programming from the last stage to the first: for every sublayer where a stage may begin, the best
    split of what follows, as (heaviest stage, cut layers, sum of squares, sublayers of each stage). Costs are
    shares of the limit.
    """
    ends = 2 * num_layers
    # What so many sublayers cost; overhead and head come on top.
    upto = [parts.stage_cost(StageLayout(1, 3, 0, size)) / limit for size in range(ends + 1)]
    best: dict[int, tuple[float, int, float, tuple[int, ...]]] = {ends: (0.0, 0, 0.0, ())}
    for stage in reversed(range(num_stages)):
        beside_layers = parts.stage_cost(StageLayout(stage, num_stages, 0, 0)) / limit
        behind, best = best, {}
        for begin in [0] if stage == 0 else range(2 * stage, ends - 1):
            choices = []
            for end in range(begin + 2, ends + 1):
                cost = round(upto[end] - upto[begin] + beside_layers, 9)
                if cost > 1:
                    break
                if end in behind:
                    heaviest, cuts, squares, sizes = behind[end]
                    heaviest, cuts, squares = max(cost, heaviest), cuts + end % 2, squares + cost * cost
                    choices.append((heaviest, cuts, squares, (end - begin, *sizes)))
            if choices:
                best[begin] = min(choices)
    return Split(best[0][3])


def check_tensor_ranks(arch: Architecture, num_tensor: int) -> None:
    """Raises ConfigError where some of the ranks that share a stage would have no head."""
    if num_tensor > arch.num_heads:
        heads = counted(arch.num_heads, "head")
        raise ConfigError("--tensor-parallel", f"{num_tensor} is more than the model's {heads}")


def check_split(split: Split, arch: Architecture, num_stages: int) -> None:
    """Raises ConfigError, naming --layers, unless `split` deals out every layer to `num_stages` stages."""
    _check_room(arch.num_layers, num_stages)
    counts = split.sublayers
    if len(counts) != num_stages:
        raise ConfigError(_FLAG, f"{split} names {counted(len(counts), 'stage')}, not {num_stages}")
    for stage, count in enumerate(counts):
        if count < 2:
            given = f"{count / 2:g} layers to stage {stage}"
            raise ConfigError(_FLAG, f"{split} gives {given}; each needs at least one")
    total = sum(counts)
    if total != 2 * arch.num_layers:
        raise ConfigError(_FLAG, f"{split} adds up to {total / 2:g} layers, but the model has {arch.num_layers}")


def balance(costs: tuple[float, ...]) -> float:
    """Efficiency of a full pipeline with these stage costs: mean over maximum, 1.0 = no stage ever waits."""
    return sum(costs) / (len(costs) * max(costs))


def _check_room(num_layers: int, num_stages: int) -> None:
    if num_stages < 1:
        raise ConfigError(_FLAG, f"{num_stages} stages: at least one is needed")
    if num_stages > num_layers:
        layers = counted(num_layers, "layer")
        raise ConfigError(_FLAG, f"{num_stages} stages cannot share {layers}; each needs at least one")
