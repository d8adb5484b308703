"""What a stage finds out before it connects to the head: its model, its device, and what their parts cost.

Costs are measured before the model is divided, in a busy server's step: decoding sequences, and the prompt tokens
that new requests bring meanwhile. (Apart, they would count the reading of the weights twice.)
A lone stage runs it without sublayers, with and without drawing; with an attention; and with an MLP behind that.
Other programs only slow a step down, so its time is the lower quartile of several turns.
Costs are kept in a file per machine and model.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import quantiles

import msgspec
import torch

from ppserve.config import ServeConfig
from ppserve.core.architecture import StageLayout
from ppserve.core.grid import RankGrid
from ppserve.core.partition import BLOCK_SIZE, PartCosts, expected_step
from ppserve.core.plan import StepPlan
from ppserve.model.cache import user_cache
from ppserve.model.checkpoint import Checkpoint
from ppserve.model.checkpoint.opening import open_checkpoint
from ppserve.model.checkpoint.tensors import fingerprint
from ppserve.process.environment import RankEnvironment
from ppserve.stage.device import DeviceSetup
from ppserve.stage.device_choice import choose
from ppserve.stage.step import Stage
from ppserve.stage.transport import Frames, connect

_MIN_TURNS, _MEASURE_S = 3, 0.3
"""Steps are measured by turns: so many times, and for so many seconds, at least."""
_LEAST_SHARE = 0.1
"""The least that a part costs of a step or layer: noise may hide a difference."""
_VERSION = 23


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The model and the device of one stage."""

    checkpoint: Checkpoint
    setup: DeviceSetup
    weights: str
    """The checkpoint's fingerprint."""
    costs: PartCosts | None = None
    """What the model's parts cost on this rank. The head balances the stages by it, so it is measured only for
    `--layers auto` with several stages, and else None."""


def probe(config: ServeConfig, environment: RankEnvironment) -> ProbeResult:
    """Open the checkpoint's headers and chooses the device. Raises UsageError."""
    stored = open_checkpoint(config.model.path)
    setup = choose(config, environment, stored.stored_dtype, stored.stored_quantization)
    checkpoint = stored.rounded_to(setup.dtype)
    return ProbeResult(checkpoint, setup, fingerprint(checkpoint))


def probe_and_measure(config: ServeConfig, environment: RankEnvironment) -> ProbeResult:
    """Probe, take over the device, and measure on it what the head needs."""
    found = probe(config, environment)
    found.setup.bind_this_thread()
    grid = config.pipeline.grid(environment.world_size)
    tensor = grid.place(environment.rank).tensor
    return replace(found, costs=measure_costs(config, grid, tensor, found.checkpoint, found.setup))


def measure_costs(
    config: ServeConfig, grid: RankGrid, tensor: int, checkpoint: Checkpoint, setup: DeviceSetup
) -> PartCosts | None:
    """Measure what the model's parts cost, if the head balances stages by it; else None.
    tensor: which of a stage's ranks this is."""
    # Of more stages than the model has layers, the head says so.
    has_choice = 1 < grid.pipeline <= checkpoint.architecture.num_layers and config.pipeline.layers is None
    if not has_choice:
        return None
    step = expected_step(checkpoint.architecture.max_positions)
    return part_costs(checkpoint, setup, step, tensor, grid.tensor)


def part_costs(
    checkpoint: Checkpoint, setup: DeviceSetup, step: StepPlan, tensor: int = 0, num_tensor: int = 1
) -> PartCosts:
    """Return seconds of each part in this step, measured once a machine. Waits for no other tensor rank."""
    path = _memory_path(checkpoint, setup, (step, tensor, num_tensor))
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(path.read_bytes(), type=PartCosts)
    costs = _measure(checkpoint, setup, step, (tensor, num_tensor))
    with contextlib.suppress(OSError):  # no cache costs seconds, not service
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_bytes(msgspec.json.encode(costs))
        scratch.replace(path)
    return costs


def _memory_path(checkpoint: Checkpoint, setup: DeviceSetup, what: object) -> Path:
    """Return one file per machine, model shape, arithmetic, operators and threads."""
    numbers = setup.dtype, setup.quantization, setup.kv_dtype
    operators = setup.reference, setup.options.batch_invariant, torch.__version__
    machine = setup.name, setup.stages_here, platform.processor()
    key = repr((_VERSION, checkpoint.architecture, numbers, operators, machine, what))
    return user_cache() / f"costs-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _measure(checkpoint: Checkpoint, setup: DeviceSetup, step: StepPlan, rank: tuple[int, int]) -> PartCosts:
    bare, attention, layer = _stages(checkpoint, setup, rank, step)
    undrawn = replace(step, slices=tuple(replace(one, draw=None) for one in step.slices))
    steps = [(bare, undrawn), (bare, step), (attention, undrawn), (layer, undrawn)]
    # CPU time where one thread computes: measuring ranks may share cores.
    has_one_thread = setup.device.type == "cpu" and setup.threads == 1
    clock = time.thread_time if has_one_thread else time.perf_counter
    bare_s, drawn_s, attention_s, layer_s = _time_by_turns(steps, clock)
    head_s = max(drawn_s - bare_s, _LEAST_SHARE * drawn_s)
    both_s = max(layer_s - bare_s, _LEAST_SHARE * layer_s)
    mlp_s = min(max(layer_s - attention_s, _LEAST_SHARE * both_s), (1 - _LEAST_SHARE) * both_s)
    return PartCosts(both_s - mlp_s, mlp_s, overhead=bare_s, head=head_s)


def _time_by_turns(steps: Sequence[tuple[Stage, StepPlan]], clock: Callable[[], float]) -> list[float]:
    """Return each step's lower quartile in seconds."""
    for stage, plan in steps:  # the first turn does not count
        stage.step(plan, 0)
    turns: list[list[float]] = []
    until_s = time.monotonic() + _MEASURE_S
    while len(turns) < _MIN_TURNS or time.monotonic() < until_s:
        begun_s = [clock()]
        for stage, plan in steps:
            stage.step(plan, 0)
            begun_s.append(clock())
        turns.append([after_s - before_s for before_s, after_s in pairwise(begun_s)])
    return [quantiles(times_s, n=4)[0] for times_s in zip(*turns, strict=True)]


def _stages(checkpoint: Checkpoint, setup: DeviceSetup, rank: tuple[int, int], plan: StepPlan) -> list[Stage]:
    """Lone stages with no sublayer, one and two, which share embedding and head."""
    whole = setup.backend().load(checkpoint, StageLayout(0, 1, 0, 2, *rank))
    num_blocks = 1 + max(block for one in plan.slices for block in one.block_table)
    (alone,) = connect((Frames(whole.arch.width, whole.backend.precision.hidden, device=setup.device),))
    return [Stage(part, alone) for part in whole.parts(num_blocks, BLOCK_SIZE)]
