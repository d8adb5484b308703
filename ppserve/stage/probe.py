"""What a stage finds out before it connects to the head: its model, its device and what their parts cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ppserve.config import ServeConfig
from ppserve.core.partition import PartCosts
from ppserve.model.checkpoint import Checkpoint
from ppserve.model.checkpoint.opening import open_checkpoint
from ppserve.model.checkpoint.tensors import fingerprint
from ppserve.process.environment import RankEnvironment
from ppserve.stage.calibrate import costs_for_shape, costs_for_split
from ppserve.stage.device import Compute, choose


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The model and the device of one stage."""

    checkpoint: Checkpoint
    compute: Compute
    weights: str = ""
    """The checkpoint's fingerprint."""
    costs: PartCosts | None = None
    """For `--layers auto`; None where they decide nothing."""
    shape_costs: dict[int, PartCosts] | None = None
    """For `--parallel auto`, by the number of tensor ranks; None without it."""


def probe(config: ServeConfig, environment: RankEnvironment) -> ProbeResult:
    """Opens the checkpoint (headers and samples only) and chooses the device. Raises UsageError."""
    stored = open_checkpoint(config.model.path)
    compute = choose(config, environment, stored.stored_dtype)
    checkpoint = stored.rounded_to(compute.dtype)
    return ProbeResult(checkpoint, compute, fingerprint(checkpoint))


def probe_and_measure(config: ServeConfig, environment: RankEnvironment) -> ProbeResult:
    """As `probe`, for a process that is this stage: it takes over its device, and measures what the head needs."""
    found = probe(config, environment)
    found.compute.occupy()
    grid = config.pipeline.grid(environment.world_size)
    tensor, parts = grid.place(environment.rank).tensor, (found.checkpoint, found.compute)
    return replace(
        found,
        costs=costs_for_split(config, grid.pipeline, *parts, tensor),
        shape_costs=costs_for_shape(config, grid.size, *parts),
    )
