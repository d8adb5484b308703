"""Every shape that a world of ranks can take, tensor ranks x stages x replicas, and what each would be worth."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ppserve.core.architecture import Architecture
from ppserve.core.figures import size, table
from ppserve.core.grid import RankGrid
from ppserve.errors import ConfigError
from ppserve.planning.clock import Clock
from ppserve.planning.cores import Cores, SharedCores
from ppserve.planning.forecast import Forecast, Intent, forecast
from ppserve.planning.machine import Device, Wires
from ppserve.planning.scenarios import MeasuredCosts, SimulatedLoad, asked, summary
from ppserve.planning.simulator import Outcome, SimulatedHead

# Of shapes with at least this share of the best throughput, the one with the shortest wait for a token wins.
_AS_FAST = 0.97


@dataclass(frozen=True, slots=True)
class Conditions:
    """What every shape is asked: on ranks of this speed, under this load. num_seqs: at once in a replica.
    acceptance: as in `simulate`. hosts: whose cores are shared; none: every rank has its own."""

    speed: Device | MeasuredCosts
    wires: Wires
    load: SimulatedLoad
    num_seqs: int = 256
    acceptance: float = 0.0
    hosts: tuple[SharedCores, ...] = ()


@dataclass(frozen=True)
class Prospect:
    """What one shape promises. outcomes: of each replica that has work under its share of the load, the largest
    share first; none: it does not fit."""

    grid: RankGrid
    plan: Forecast
    outcomes: tuple[Outcome, ...] = ()

    @property
    def fits(self) -> bool:
        return bool(self.outcomes)

    @property
    def output_tokens_per_s(self) -> float:
        return float(self.figures.get("output_tokens_per_s", 0.0))

    @cached_property
    def figures(self) -> dict[str, Any]:
        """As numbers: the sizes, and `scenarios.summary` of the replica with the most work, with the requests and
        the rates of all replicas together."""
        shape = {"tensor": self.grid.tensor, "stages": self.grid.pipeline, "replicas": self.grid.data}
        if not self.fits:
            return {**shape, "fits": False}
        summaries = [summary(outcome) for outcome in self.outcomes]
        added = [name for name in summaries[0] if name == "requests" or name.endswith("_per_s")]
        of_all = {name: sum(each[name] for each in summaries) for name in added}
        return {**shape, "fits": True, **summaries[0], **of_all}


def shapes(world_size: int, arch: Architecture) -> list[RankGrid]:
    """All grids of so many ranks in which every stage has a layer and every tensor rank a head."""
    return [
        RankGrid(tensor, world_size // (tensor * stages), stages)
        for stages in range(1, min(world_size, arch.num_layers) + 1)
        for tensor in range(1, min(world_size, arch.num_heads) + 1)
        if world_size % (tensor * stages) == 0
    ]


def prospects(arch: Architecture, intent: Intent, world_size: int, under: Conditions) -> list[Prospect]:
    """One of each shape, the best first; what does not fit comes last. intent: its number of stages, of tensor
    ranks, and its split are not used. Raises ConfigError where no shape fits."""
    anyhow = replace(intent, layers=None)
    found = [prospect(arch, anyhow, grid, under) for grid in shapes(world_size, arch)]
    fitting = [each for each in found if each.fits]
    if not fitting:
        raise ConfigError("--world", f"no shape of {world_size} ranks holds this model")
    first = best(fitting)
    rest = sorted((p for p in found if p is not first), key=lambda p: -p.output_tokens_per_s)
    return [first, *rest]


def best(fitting: list[Prospect]) -> Prospect:
    """The most tokens per second; among those as fast, the one with the shortest time between tokens."""
    limit = _AS_FAST * max(each.output_tokens_per_s for each in fitting)
    return min(
        (each for each in fitting if each.output_tokens_per_s >= limit),
        key=lambda each: (each.figures["itl_s_p50"], each.grid.size - each.grid.data),
    )


def prospect(arch: Architecture, intent: Intent, grid: RankGrid, under: Conditions) -> Prospect:
    """One shape's. Raises ConfigError where the intent names a split for another number of stages."""
    plan = forecast(arch, replace(intent, num_stages=grid.pipeline, num_tensor=grid.tensor))
    if plan.max_sequences < 1:
        return Prospect(grid, plan)
    # Every tensor rank of a stage sends its result.
    wires = replace(under.wires, report_s=under.wires.report_s * grid.tensor)
    clock = Clock()
    hosts = [Cores(host, clock) for host in under.hosts]
    cores = {rank: host for host in hosts for rank in host.of.ranks}
    if any(host.of.are_scarce for host in hosts):
        # Ranks that share cores do not come to a gather at the same time. All but the last that comes spin.
        wires = replace(wires, gather_s=wires.gather_s + wires.spin_s * (1 - 1 / grid.tensor))
    head, how = SimulatedHead(clock, cores.get(0)), (under.num_seqs, under.acceptance)
    runs = [
        asked(plan, under.speed, wires, load, *how, head, _places(grid, replica, cores))
        for replica, load in enumerate(shares(under.load, grid.data))
    ]
    clock.run()
    return Prospect(grid, plan, tuple(run.end() for run in runs))


def _places(grid: RankGrid, replica: int, cores: dict[int, Cores]) -> tuple[tuple[Cores, ...], ...]:
    """For each stage of a replica, the cores of each of its ranks; none where every rank has its own."""
    if not cores:
        return ()
    stages, tensors = range(grid.pipeline), range(grid.tensor)
    return tuple(tuple(cores[grid.rank(tensor, replica, stage)] for tensor in tensors) for stage in stages)


def shares(load: SimulatedLoad, replicas: int) -> list[SimulatedLoad]:
    """A load divided among replicas, its requests and its callers; the largest share first. A replica without a
    request or a caller is left out."""
    # In turns: of a closed loop to the callers, who are dealt to the replicas; of a trace to these.
    turns = load.concurrency or replicas
    divided = []
    for replica in range(replicas):
        own = tuple(each for place, each in enumerate(load.requests) if place % turns % replicas == replica)
        callers = load.concurrency and len(range(replica, load.concurrency, replicas))
        if own:
            divided.append(SimulatedLoad(own, callers))
    return divided


# ---- as text -----------------------------------------------------------------------------------------------


def render_prospects(found: list[Prospect]) -> str:
    """A row per shape, the best first."""
    heading = ("shape", "layers", "weights", "tokens/s", "TTFT p50", "ITL p50", "ITL p99", "busy")
    rows = [heading, *(_row(each) for each in found)]
    note = "(tensor ranks x stages x replicas; weights of the heaviest rank; busy: share of the time with work)"
    return "\n".join([*table(*rows, left=2), note])


def _row(each: Prospect) -> tuple[str, ...]:
    weights = size(max(stage.weight_bytes for stage in each.plan.stages))
    what = (shape_name(each.grid), str(each.plan.split), weights)
    if not each.fits:
        return (*what, "does not fit", "", "", "", "")
    figures = each.figures
    busy = [stage["busy"] for stage in figures["stages"]]
    times = (f"{1e3 * figures[key]:.3g} ms" for key in ("ttft_s_p50", "itl_s_p50", "itl_s_p99"))
    return (*what, f"{each.output_tokens_per_s:.4g}", *times, f"{sum(busy) / len(busy):.0%}")


def shape_name(grid: RankGrid) -> str:
    """tensor x stages x replicas, as everywhere in the documents."""
    return f"{grid.tensor}x{grid.pipeline}x{grid.data}"
