"""What a stage finds out before it connects to the head: its model, its device, and what the model's parts cost
there.

Costs are measured before the model is divided, in the step of a busy server: decoding sequences, and the prompt
tokens that new requests bring meanwhile. (If the two were measured apart, reading the weights would count twice.)
A stage that is alone runs this step four times: without sublayers, not drawing and drawing; with an attention; and
with an attention and an MLP. Other programs can only slow a step down, so its time is the lower quartile of
several turns. Costs are kept in a file for each machine and model.
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
from msgspec import structs

from ppserve.config import ServeConfig
from ppserve.core.architecture import StageLayout
from ppserve.core.grid import RankGrid
from ppserve.core.partition import BLOCK_SIZE, PartCosts, expected_step
from ppserve.core.plan import StepPlan
from ppserve.model.cache import kernel_directory, user_cache
from ppserve.model.checkpoint import Checkpoint
from ppserve.model.checkpoint.opening import is_on_hub, open_checkpoint
from ppserve.model.checkpoint.tensors import fingerprint
from ppserve.process.environment import RankEnvironment
from ppserve.stage.device import DeviceSetup
from ppserve.stage.device_choice import choose
from ppserve.stage.step import Stage
from ppserve.stage.transport import Frames, connect

_MIN_TURNS, _MEASURE_S = 3, 0.3
"""Steps are measured by turns, at least so many times and for at least so many seconds."""
_LEAST_SHARE = 0.1
"""A part costs at least this share of a step or a layer, because noise may hide a difference."""
_VERSION = 23


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The model and the device of one stage."""

    checkpoint: Checkpoint
    setup: DeviceSetup
    weights: str
    """The checkpoint's fingerprint."""
    costs: PartCosts | None = None
    """What the model's parts cost on this rank. The head balances the stages by it. It is measured only for
    `--layers auto` with several stages; otherwise it is None."""


def probe(config: ServeConfig, environment: RankEnvironment) -> ProbeResult:
    """Open the checkpoint, of which only headers are read, and choose the device. Raises UsageError."""
    stored = open_checkpoint(config.model.path)
    setup = choose(config, environment, stored.stored_dtype, stored.stored_quantization)
    checkpoint = stored.rounded_to(setup.dtype)
    return ProbeResult(checkpoint, setup, fingerprint(checkpoint))


def probe_and_measure(
    config: ServeConfig, environment: RankEnvironment, report: Callable[[str], object]
) -> ProbeResult:
    """Probe, bind this thread to the device, compile its kernels, and measure there what the head needs to know.
    report: called with what is done next, in words. Raises UsageError."""
    path = config.model.path
    report(f"fetching {path}, unless it is here" if is_on_hub(path) else "opening the model")
    found = probe(config, environment)
    found.setup.bind_this_thread()
    kept = f"first start only, kept in {with_tilde(kernel_directory(os.environ).parent)}"
    grid = config.pipeline.grid(environment.world_size)
    found.setup.backend().compile(
        lambda which, count: report(f"compiling kernels, {which} of {count} ({kept})"), grid.tensor
    )
    report("measuring layers")
    tensor = grid.place(environment.rank).tensor
    return replace(found, costs=measure_costs(config, grid, tensor, found.checkpoint, found.setup))


def with_tilde(path: Path) -> str:
    """Return a path as printable text of one line, with `~` for the user's home. Bytes that are no text are
    escaped."""
    home = os.path.expanduser("~")
    text = str(path).replace(home, "~", 1) if path.is_relative_to(home) else str(path)
    return text if text.isprintable() else ascii(text)


def measure_costs(
    config: ServeConfig, grid: RankGrid, tensor: int, checkpoint: Checkpoint, setup: DeviceSetup
) -> PartCosts | None:
    """Measure what the model's parts cost, if the head balances stages by it; else return None. tensor: the rank's
    number among the tensor ranks of its stage."""
    # If there are more stages than layers, the head reports that.
    has_choice = 1 < grid.pipeline <= checkpoint.architecture.num_layers and config.pipeline.layers is None
    if not has_choice:
        return None
    step = expected_step(checkpoint.architecture.max_positions)
    return part_costs(checkpoint, setup, step, tensor, grid.tensor)


def part_costs(
    checkpoint: Checkpoint, setup: DeviceSetup, step: StepPlan, tensor: int = 0, num_tensor: int = 1
) -> PartCosts:
    """Return the seconds that each part takes in this step. They are measured once on each machine. This waits for
    no other tensor rank."""
    path = _costs_path(checkpoint, setup, (step, tensor, num_tensor))
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(path.read_bytes(), type=PartCosts)
    costs = _measure(checkpoint, setup, step, (tensor, num_tensor))
    with contextlib.suppress(OSError):  # if nothing can be kept, the next start measures again
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_bytes(msgspec.json.encode(costs))
        scratch.replace(path)
    return costs


def _costs_path(checkpoint: Checkpoint, setup: DeviceSetup, what: object) -> Path:
    """Return the file that keeps the costs for this machine, architecture, arithmetic and number of threads."""
    numbers = setup.dtype, setup.quantization, setup.kv_dtype
    operators = setup.reference, setup.options.batch_invariant, torch.__version__
    machine = setup.name, setup.stages_here, platform.processor()
    key = repr((_VERSION, checkpoint.architecture, numbers, operators, machine, what))
    return user_cache() / f"costs-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _measure(checkpoint: Checkpoint, setup: DeviceSetup, step: StepPlan, rank: tuple[int, int]) -> PartCosts:
    bare, attention, layer = _stages(checkpoint, setup, rank, step)
    undrawn = structs.replace(step, slices=tuple(structs.replace(one, draw=None) for one in step.slices))
    steps = [(bare, undrawn), (bare, step), (attention, undrawn), (layer, undrawn)]
    # Where one thread computes, CPU time is measured, because several ranks that measure may share a core.
    has_one_thread = setup.device.type == "cpu" and setup.threads == 1
    clock = time.thread_time if has_one_thread else time.perf_counter
    bare_s, drawn_s, attention_s, layer_s = _time_by_turns(steps, clock)
    head_s = max(drawn_s - bare_s, _LEAST_SHARE * drawn_s)
    both_s = max(layer_s - bare_s, _LEAST_SHARE * layer_s)
    mlp_s = min(max(layer_s - attention_s, _LEAST_SHARE * both_s), (1 - _LEAST_SHARE) * both_s)
    return PartCosts(both_s - mlp_s, mlp_s, overhead=bare_s, head=head_s)


def _time_by_turns(steps: Sequence[tuple[Stage, StepPlan]], clock: Callable[[], float]) -> list[float]:
    """Run the steps by turns. Return the lower quartile of each one's times, in seconds."""
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
    """Make stages that are alone, with no sublayer, one and two. They share embedding and head."""
    whole = setup.backend().load(checkpoint, StageLayout(0, 1, 0, 2, *rank))
    num_blocks = 1 + max(block for one in plan.slices for block in one.block_table)
    (alone,) = connect((Frames(whole.arch.width, whole.backend.precision.hidden, device=setup.device),))
    return [Stage(part, alone) for part in whole.parts(num_blocks, BLOCK_SIZE)]
