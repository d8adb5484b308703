"""Every shape that a world of ranks can take, tensor ranks x stages x replicas, and what each would give.

B sequences in m microbatches on P stages that compute a step in s, with a time h in which tokens return:

    tokens per second = B / max(P·s + h, m·s)

The first term is the way of a token through all stages, the second the steps of the busiest one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ppserve.core.architecture import Architecture, StageLayout
from ppserve.core.figures import size, table
from ppserve.core.grid import RankGrid
from ppserve.core.plan import StepPlan
from ppserve.errors import ConfigError
from ppserve.planning.forecast import Forecast, Intent, forecast

LATENCY_S = 50e-6  # between ranks of one host


@dataclass(frozen=True, slots=True)
class Conditions:
    """What is equal for all shapes that are compared."""

    stage_s: Callable[[StageLayout, StepPlan], float]
    """What a rank of a stage computes in a step."""
    latency_s: float = LATENCY_S
    """Between ranks. Only latencies count: what ranks exchange in a step is small."""
    return_s: float = 0.5e-3
    """Time from a step's end to the beginning of the one with its tokens: result, the head's work, plan."""
    num_cores: float = math.inf
    """Ranks that can compute at the same time, with all their threads."""


@dataclass(frozen=True, slots=True)
class Prospect:
    """What one shape promises."""

    grid: RankGrid
    plan: Forecast
    tokens_per_s: float | None = None
    """Tokens per second of all replicas together; None where nothing is known of the ranks' speed."""
    itl_s: float | None = None

    @property
    def fits(self) -> bool:
        return self.plan.max_sequences > 0

    @property
    def figures(self) -> dict[str, Any]:
        return {
            "tensor": self.grid.tensor,
            "stages": self.grid.pipeline,
            "replicas": self.grid.data,
            "fits": self.fits,
            "weight_bytes": max(stage.weight_bytes for stage in self.plan.stages),
            "max_sequences": self.plan.max_sequences * self.grid.data,
            "balance": self.plan.balance,
            "output_tokens_per_s": self.tokens_per_s,
            "itl_s": self.itl_s,
        }


def shapes(world_size: int, arch: Architecture) -> list[RankGrid]:
    """All grids of so many ranks in which every stage has a layer and every tensor rank a head."""
    return [
        RankGrid(tensor, world_size // (tensor * stages), stages)
        for stages in range(1, min(world_size, arch.num_layers) + 1)
        for tensor in range(1, min(world_size, arch.num_kv_heads) + 1)
        if world_size % (tensor * stages) == 0
    ]


def compare(arch: Architecture, intent: Intent, world_size: int, under: Conditions | None) -> list[Prospect]:
    """One of each shape: the fastest first, if `under` says how fast ranks are, and what does not fit last.
    intent: without its stages, tensor ranks and split. Raises ConfigError where no shape fits."""
    found = [_prospect(arch, intent, grid, under) for grid in shapes(world_size, arch)]
    if not any(each.fits for each in found):
        raise ConfigError("--model", f"no shape of {world_size} ranks holds it")
    return sorted(found, key=lambda each: (not each.fits, -(each.tokens_per_s or 0.0)))


def _prospect(arch: Architecture, intent: Intent, grid: RankGrid, under: Conditions | None) -> Prospect:
    plan = forecast(arch, replace(intent, layers=None, num_stages=grid.pipeline, num_tensor=grid.tensor))
    if plan.max_sequences < 1 or under is None:
        return Prospect(grid, plan)
    workload = intent.expect
    step = workload.step(plan.max_model_len, workload.decodes(grid.size, grid.tensor))
    seconds = [under.stage_s(s.layout, step) + num_gathers(s.layout) * under.latency_s for s in plan.stages]
    num_tokens = min(workload.prompt + workload.new, plan.max_model_len)
    fitting = max(1, plan.tightest.max_tokens // num_tokens)
    replicas = min(grid.data, workload.callers)
    slots = min(grid.pipeline, max(1, workload.callers // replicas), fitting)
    return_s = under.return_s + (grid.pipeline - 1) * under.latency_s
    # Ranks that share cores take turns.
    in_turn_s = replicas * slots * grid.tensor * sum(seconds) / under.num_cores
    round_s = max(round_seconds(seconds, slots, return_s), in_turn_s)
    drawn = sum(piece.num_draws for piece in step.slices) * workload.drawn_share(plan.max_model_len)
    new_tokens = min(slots * drawn, fitting)
    return Prospect(grid, plan, min(replicas * new_tokens, workload.callers) / round_s, round_s)


def round_seconds(stage_s: Sequence[float], slots: int, return_s: float) -> float:
    """Time in which every sequence in flight gets a token: max(P·s + h, m·s), for stages that may differ."""
    return max(sum(stage_s) + return_s, slots * max(stage_s))


def num_gathers(layout: StageLayout) -> int:
    """How often in a step the tensor ranks of a stage wait for each other: once for the embedding and the head's
    draws, twice for each attention (its heads, its result) and MLP (its inner rows, its result)."""
    return (layout.num_tensor > 1) * (layout.is_first + 2 * layout.num_sublayers + layout.is_last)


def render_prospects(found: list[Prospect]) -> str:
    """A row per shape."""
    heading = ("shape", "layers", "weights", "sequences", "balance", "tokens/s", "ITL (s)")
    note = "(tensor ranks x stages x replicas; weights of the heaviest rank; tokens/s without the head's work)"
    return "\n".join([*table(heading, *map(_row, found), left=2), note])


def _row(each: Prospect) -> tuple[str, ...]:
    figures = each.figures
    what = (shape_name(each.grid), str(each.plan.split), size(figures["weight_bytes"]))
    if not each.fits:
        return (*what, "do not fit", "", "", "")
    rate, itl = ("" if value is None else f"{value:.4g}" for value in (each.tokens_per_s, each.itl_s))
    return (*what, f"{figures['max_sequences']:,}", f"{each.plan.balance['decode']:.0%}", rate, itl)


def shape_name(grid: RankGrid) -> str:
    """tensor x stages x replicas, as everywhere in the documents."""
    return f"{grid.tensor}x{grid.pipeline}x{grid.data}"
