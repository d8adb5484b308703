"""What the parts of a model cost on this machine, measured at start-up before the model is divided.

What is measured is the step that a busy server computes all the time: sequences decoding, and beside them as many
prompt tokens as new requests bring meanwhile. (Prompts and decodes measured apart and added up count the reading
of the weights twice.) Pipelines of one stage run it: with no sublayer, where drawing makes the difference that is
the head; with an attention; and with an MLP behind it. The costs are kept in a file per machine and model.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from ppserve.config import ServeConfig
from ppserve.core.architecture import StageLayout
from ppserve.core.partition import PartCosts
from ppserve.core.plan import StepPlan
from ppserve.core.workload import BLOCK_SIZE, ExpectedStep, ExpectedWorkload
from ppserve.model.checkpoint import Checkpoint
from ppserve.model.gpt2 import GPT2Stage
from ppserve.stage.device import Compute
from ppserve.stage.step import Stage
from ppserve.stage.transport import Frames, connect
from ppserve.stage.transport.gather import pretend_ranks

_REPEATS = 7
_MEASURE_S, _MEASURE_SHAPE_S = 0.1, 0.5
"""Steps are measured by turns for so long, and at least _REPEATS times."""
_VERSION = 21


def costs_for_split(
    config: ServeConfig, num_stages: int, checkpoint: Checkpoint, compute: Compute, tensor: int = 0
) -> PartCosts | None:
    """The costs for `--layers auto`; None where there is nothing to decide. tensor: which of its stage's tensor
    ranks this is."""
    # Too many stages for the model: the head says so.
    divisible = 1 < num_stages <= checkpoint.architecture.num_layers
    if not divisible or config.pipeline.layers is not None:
        return None
    step = _workload(config).step(checkpoint.architecture.max_positions)
    return part_costs(checkpoint, compute, step, tensor, config.pipeline.tensor_parallel)


def costs_for_shape(
    config: ServeConfig, world_size: int, checkpoint: Checkpoint, compute: Compute
) -> dict[int, PartCosts] | None:
    """The costs for `--parallel auto`, by the number of tensor ranks; None without that flag."""
    if config.pipeline.parallel != "auto":
        return None
    workload, arch = _workload(config), checkpoint.architecture
    counts = [n for n in range(1, min(world_size, arch.num_heads) + 1) if world_size % n == 0]
    steps = {n: workload.step(arch.max_positions, workload.decodes(world_size, n)) for n in counts}
    return {n: part_costs(checkpoint, compute, step, 0, n, _MEASURE_SHAPE_S) for n, step in steps.items()}


def _workload(config: ServeConfig) -> ExpectedWorkload:
    expected = config.scheduling
    return ExpectedWorkload(expected.expect_prompt, expected.expect_new, expected.expect_callers)


def part_costs(
    checkpoint: Checkpoint,
    compute: Compute,
    step: ExpectedStep,
    tensor: int = 0,
    num_tensor: int = 1,
    measure_s: float = _MEASURE_S,
) -> PartCosts:
    """Seconds of each part in this step; read from the file where it was measured before.

    tensor, num_tensor: which tensor rank of how many; it does not wait for the others.
    """
    path = _memory_path(checkpoint, compute, (step, tensor, num_tensor, measure_s))
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(path.read_bytes(), type=PartCosts)
    costs = _measure(checkpoint, compute, step, (tensor, num_tensor), measure_s)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs seconds, not service
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_bytes(msgspec.json.encode(costs))
        scratch.replace(path)
    return costs


def _memory_path(checkpoint: Checkpoint, compute: Compute, what: object) -> Path:
    """One file per machine, model shape, arithmetic, operators, and numbers of threads and of stages here."""
    numbers = compute.dtype, compute.quantization, compute.kv_dtype
    operators = compute.reference, compute.options.batch_invariant, torch.__version__
    machine = compute.name, compute.stages_here, platform.processor()
    key = repr((_VERSION, checkpoint.architecture, numbers, operators, machine, what))
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "ppserve" / f"costs-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _measure(
    checkpoint: Checkpoint, compute: Compute, step: ExpectedStep, rank: tuple[int, int], measure_s: float
) -> PartCosts:
    silent = _without_draws(step.plan)
    layouts = (StageLayout(0, 1, 0, num_sublayers, *rank) for num_sublayers in (0, 1, 2))
    bare, attention, layer = (_stage(checkpoint, compute, layout, step.plan) for layout in layouts)
    # CPU time where one thread computes: ranks that measure at the same time may share cores.
    alone = compute.device.type == "cpu" and compute.threads == 1
    clock = time.thread_time if alone else time.perf_counter
    overhead_s, drawn_s, attention_s, layer_s = _fastest(
        clock, measure_s, [(bare, silent), (bare, step.plan), (attention, silent), (layer, silent)]
    )
    # Noise may make a part that costs next to nothing seem to cost less.
    return PartCosts(
        attention=max(attention_s - overhead_s, 1e-9),
        mlp=max(layer_s - attention_s, 1e-9),
        overhead=overhead_s,
        head=step.drawn_share * max(drawn_s - overhead_s, 0.0),
    )


def _fastest(clock: Callable[[], float], measure_s: float, steps: list[tuple[Stage, StepPlan]]) -> list[float]:
    """Seconds of each step at its fastest, when others on the machine disturbed it least. Steps are measured by
    turns, because a machine is faster in some seconds than in others. The first turn does not count."""
    fastest_s = [float("inf")] * len(steps)
    for stage, plan in steps:
        stage.step(plan, 0)
    num_turns, until_s = 0, time.monotonic() + measure_s
    while num_turns < _REPEATS or time.monotonic() < until_s:
        for number, (stage, plan) in enumerate(steps):
            begun_s = clock()
            stage.step(plan, 0)
            fastest_s[number] = min(fastest_s[number], clock() - begun_s)
        num_turns += 1
    return fastest_s


def _without_draws(plan: StepPlan) -> StepPlan:
    """The step without drawing: no row goes through the head."""
    return replace(plan, slices=tuple(replace(piece, draw=None) for piece in plan.slices))


def _stage(checkpoint: Checkpoint, compute: Compute, layout: StageLayout, plan: StepPlan) -> Stage:
    """A lone stage with these sublayers, and with KV blocks for this step."""
    model = GPT2Stage.load(checkpoint, layout, compute.backend(compute.dtype))
    num_blocks = 1 + max(block for piece in plan.slices for block in piece.block_table)
    cache = model.backend.make_cache(model.arch, layout, num_blocks, BLOCK_SIZE)
    # Memory that was never written reads as one page of zeros, from the nearest cache.
    cache.fill(0.01)
    (alone,) = connect((Frames(model.arch.width, model.backend.precision.hidden, device=compute.device),))
    gather = pretend_ranks(layout.num_tensor)
    return Stage(model, cache, alone, gather)
