"""Which part of the model goes to which stage, for the load that is expected.

All layers are taken to cost the same. The last stage also has the LM head. Stages are cut between layers or, where
that balances them better, between a layer's attention and its MLP. The best split is the one whose most expensive
stage is cheapest.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from statistics import fmean

from ppserve.core.architecture import Architecture, Split, StageLayout, stage_layouts, sublayer_params
from ppserve.core.figures import counted
from ppserve.core.plan import Draw, Slice, StepPlan
from ppserve.core.request import SamplingParams
from ppserve.errors import ConfigError

# A layer is cut only where that makes the most expensive stage cheaper by more than this share.
_WORTH_A_CUT = 0.01

BLOCK_SIZE = 16
"""How many positions a KV block has in the expected step."""
EXPECTED_PROMPT = 128
"""How many tokens a typical prompt has, in the load that `--layers auto` and `ppserve plan` expect."""
EXPECTED_NEW = 128
"""How many tokens a typical answer has."""
_EXPECTED_DECODES = 16


def expected_step(max_positions: int) -> StepPlan:
    """Return a step of a busy server. It has sequences that are half way through their answers, and as many prompt
    tokens as new requests bring meanwhile. max_positions: those of the model; they bound the sequences."""
    prompt = max(1, min(EXPECTED_PROMPT, max_positions - 1))
    context = min(prompt + EXPECTED_NEW // 2, max_positions - 1)
    num_tokens = round(_EXPECTED_DECODES * prompt / EXPECTED_NEW)
    prompts = [((prompt - num_tokens) // 2, num_tokens)] if num_tokens else []
    return _plan([(context, 1)] * _EXPECTED_DECODES + prompts, _EXPECTED_DECODES)


def _plan(spans: list[tuple[int, int]], num_draws: int) -> StepPlan:
    """Return a step with a slice for each span (start, number of tokens). Each slice has blocks of its own. The
    first `num_draws` slices draw."""
    slices, num_blocks = [], 0
    for number, (start, num_tokens) in enumerate(spans):
        table = tuple(range(num_blocks, num_blocks - (-(start + num_tokens) // BLOCK_SIZE)))
        num_blocks += len(table)
        draw = Draw(SamplingParams(seed=number, temperature=0.8)) if number < num_draws else None
        slices.append(Slice(number, start, (1,) * num_tokens, table, draw))
    return StepPlan(0, 0, 0, tuple(slices))


@dataclass(frozen=True, slots=True)
class PartCosts:
    """What the parts of a model cost in a step, all in the same unit (seconds, bytes or parameters).

    Nothing else says what a layer costs. `stage.probe` measures it before the layers are divided. `measured_parts`
    computes it from the times of stages. `decode_parts` counts weights where nothing was measured.
    """

    attention: float
    """The cost of one layer's attention, with its norm."""
    mlp: float
    """The cost of one layer's MLP, with its norm."""
    overhead: float
    """What every stage costs in addition to its layers, with the embedding of a few rows."""
    head: float
    """The cost of the final norm, the LM head and sampling, which only the last stage has."""

    @property
    def layer(self) -> float:
        return self.attention + self.mlp

    def stage_cost(self, layout: StageLayout) -> float:
        cost = len(layout.attentions) * self.attention + len(layout.mlps) * self.mlp + self.overhead
        return cost + self.head if layout.is_last else cost

    def costs(self, split: Split) -> tuple[float, ...]:
        return tuple(map(self.stage_cost, stage_layouts(split)))


def mean(parts: tuple[PartCosts, ...]) -> PartCosts:
    """Return the mean of the costs that several stages measured."""
    return PartCosts(*map(fmean, zip(*map(astuple, parts), strict=True)))


def decode_parts(arch: Architecture) -> PartCosts:
    """Count the weights of each part that a decode step reads. The step costs about that while memory is the
    limit.

    Where a row reads only some of the experts, these are fewer than the weights that are held. The parts of a
    layer are means over all layers. The head reads its whole matrix (as much as 5.45 layers of GPT-2 124M); the
    embedding reads two rows, which do not count.
    """
    halves = [StageLayout(0, 1, sublayer, 1) for sublayer in range(2 * arch.num_layers)]
    reads = [sublayer_params(arch, half, is_read=True) for half in halves]
    head = arch.vocab_size * arch.width + arch.final_norm.num_params(arch.width)
    return PartCosts(fmean(reads[::2]), fmean(reads[1::2]), 0.0, head)


def measured_parts(arch: Architecture, layouts: Sequence[StageLayout], taken: Sequence[float]) -> PartCosts:
    """Divide the times that two or more stages computed among the parts of the model. taken: the time of each
    stage, in any unit.

    The time of layers is divided between attentions and MLPs in the ratio of their parameters. What the last stage
    takes beyond its layers is the time of the LM head. The embedding only gathers a few rows, so its time is
    counted with the first stage's layers.
    """
    weights = replace(decode_parts(arch), head=0.0)
    held = [weights.stage_cost(layout) for layout in layouts]
    of_weight = sum(taken[:-1]) / sum(held[:-1])
    head = max(0.0, taken[-1] - of_weight * held[-1])
    return PartCosts(of_weight * weights.attention, of_weight * weights.mlp, 0.0, head)


def balance(costs: tuple[float, ...]) -> float:
    """Return the efficiency of a full pipeline with these costs of stages: their mean divided by their maximum. At
    1.0, no stage waits."""
    return sum(costs) / (len(costs) * max(costs))


def split_by_weight(arch: Architecture, num_stages: int) -> Split:
    """Return the split that balances the weights that a decode step reads. Raises ConfigError."""
    return split_by_cost(decode_parts(arch), arch.num_layers, num_stages)


def split_by_cost(parts: PartCosts, num_layers: int, num_stages: int) -> Split:
    """Return the split, with at least one layer in each stage, whose most expensive stage is cheapest. Raises
    ConfigError."""
    if not 1 <= num_stages <= num_layers:
        layers = counted(num_layers, "layer")
        raise ConfigError("--stages", f"{num_stages} stages cannot share {layers}; each needs at least one")
    # Where whole layers do not divide evenly, earlier stages get one more.
    best = _whole_layers(parts, num_layers, num_stages)
    limit = (1 - _WORTH_A_CUT) * max(parts.costs(best))
    while (better := _fill(parts, num_layers, num_stages, limit)) is not None:
        best = better
        limit = math.nextafter(max(parts.costs(best)), 0)
    return best


def _whole_layers(parts: PartCosts, num_layers: int, num_stages: int) -> Split:
    """Give one layer after the other to the stage that is cheapest so far. The result is the best of its kind,
    because all layers cost the same."""
    sublayers = [2] * num_stages
    costs = list(parts.costs(Split(tuple(sublayers))))
    for _ in range(num_layers - num_stages):
        lightest = costs.index(min(costs))
        sublayers[lightest] += 2
        costs[lightest] += parts.layer
    return Split(tuple(sublayers))


def _fill(parts: PartCosts, num_layers: int, num_stages: int, limit: float) -> Split | None:
    """Give each stage in turn as many sublayers as it can have below `limit`, but leave a layer for each later
    stage. Return None if not all layers can be given away like this."""
    sublayers: list[int] = []

    def cost(size: int) -> float:
        return parts.stage_cost(StageLayout(len(sublayers), num_stages, sum(sublayers), size))

    for num_later in reversed(range(num_stages)):
        sizes = range(2 * (num_layers - num_later) - sum(sublayers) + 1)
        sublayers.append(bisect_right(sizes, limit, key=cost) - 1)
    is_filled = min(sublayers) >= 2 and sum(sublayers) == 2 * num_layers
    return Split(tuple(sublayers)) if is_filled else None


def check_tensor_ranks(arch: Architecture, num_tensor: int) -> None:
    """Raise ConfigError if some of the ranks that share a stage would have no head."""
    if num_tensor > arch.num_kv_heads:
        heads = counted(arch.num_kv_heads, "head")
        if arch.queries_per_kv_head > 1:
            heads += " of keys and values"
        raise ConfigError("--tensor-parallel", f"{num_tensor} is more than the model's {heads}")


def check_split(split: Split, arch: Architecture, num_stages: int) -> None:
    """Raise ConfigError unless `split` divides all layers among `num_stages` stages."""
    counts = split.sublayers
    total = sum(counts) / 2
    if len(counts) != num_stages:
        problem = f"names {counted(len(counts), 'stage')}, not {num_stages}"
    elif min(counts) < 2:
        stage = counts.index(min(counts))
        problem = f"gives {counts[stage] / 2:g} layers to stage {stage}; each needs at least one"
    elif total != arch.num_layers:
        problem = f"adds up to {total:g} layers, but the model has {arch.num_layers}"
    else:
        return
    raise ConfigError("--layers", f"{split} {problem}")
