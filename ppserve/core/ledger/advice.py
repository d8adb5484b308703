"""One sentence of advice: which cause wastes the most time, and what would reduce it."""

from __future__ import annotations

from ppserve.core.architecture import Architecture, StageLayout
from ppserve.core.ledger.account import StageTimes
from ppserve.core.ledger.causes import CAUSES, IMBALANCE, MEANINGS, TOKEN_RETURN
from ppserve.core.partition import balance, measured_parts, split_by_cost

# Advice is given from these values on.
_WORTHWHILE_SHARE = 0.05  # the largest cause's share of the time with work
_MIN_DEMAND_NS = 2_000_000_000  # the time with work of each stage
_WORTHWHILE_GAIN = 0.01  # what another split would add to the balance


def advise(
    stages: tuple[StageTimes, ...], layouts: tuple[StageLayout, ...], arch: Architecture, microbatches: int
) -> str | None:
    """Return the advice; None if the pipeline is well used, or was measured for too short a time. microbatches:
    how many steps may be in flight."""
    demand_ns = sum(times.demand_ns for times in stages)
    if demand_ns < _MIN_DEMAND_NS * len(stages):
        return None
    lost_ns = {cause: sum(times.bubble_ns[cause] for times in stages) for cause in CAUSES}
    cause = max(lost_ns, key=lost_ns.__getitem__)
    share = lost_ns[cause] / demand_ns
    if share < _WORTHWHILE_SHARE:
        return None
    meaning = MEANINGS[cause]
    remedy = _rebalance(stages, layouts, arch) if cause == IMBALANCE else f"{meaning.what}; {meaning.helps}"
    if cause == TOKEN_RETURN and microbatches <= len(stages):
        remedy = f"{meaning.what}; --microbatches {len(stages) + 1} would hide it"
    return f"{cause} ({share:.0%} of the time): {remedy}"


def _rebalance(stages: tuple[StageTimes, ...], layouts: tuple[StageLayout, ...], arch: Architecture) -> str:
    busy = [times.computed_ns for times in stages]
    slowest = max(range(len(busy)), key=busy.__getitem__)
    others = (sum(busy) - busy[slowest]) / (len(busy) - 1)
    finding = f"stage {slowest} is {busy[slowest] / others - 1:.0%} slower than the others"
    parts = measured_parts(arch, layouts, busy)
    better = split_by_cost(parts, layouts[-1].layers.stop, len(layouts))
    now, then = balance(tuple(busy)), balance(parts.costs(better))
    if then < now + _WORTHWHILE_GAIN:
        return f"{finding}; no other split would be better"
    return f"{finding}; --layers {better} predicts {then:.0%} instead of {now:.0%}"
