"""What the parts of a model cost on this machine, measured before it is cut.

For `--parallel auto`, which compares shapes of the whole pipeline, steps of several sizes are measured and fitted.
For `--layers auto` one step is enough.

What is measured is the step that a busy server computes all the time: sequences decoding, and beside them as many
prompt tokens as new requests bring meanwhile. (Prompts and decodes measured apart and added up count the reading
of the weights twice.) Pipelines of one stage run it: with no sublayer, where drawing makes the difference that is
the head; with an attention; and with an MLP behind it. It takes seconds, and is remembered per machine and model.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import TypeVar

import msgspec
import torch

from ppserve.config import ServeConfig
from ppserve.core.architecture import Architecture, StageLayout
from ppserve.core.cost_model import LayerCosts, StageCost, StepSize
from ppserve.core.partition import PartCosts
from ppserve.core.plan import Draw, Slice, StepPlan
from ppserve.core.request import SamplingParams
from ppserve.model.checkpoint import Checkpoint
from ppserve.model.gpt2 import GPT2Stage
from ppserve.stage import step_overhead
from ppserve.stage.device import Compute
from ppserve.stage.step import Stage
from ppserve.stage.transport import Frames, connect
from ppserve.stage.transport.gather import pretend_ranks

DECODES = 16
_BLOCK_SIZE = 16
_MAX_PROMPT_TOKENS = 128
_REPEATS = 7
# How long the parts of `layer_costs` are measured by turns, at least _REPEATS of them.
_TURNS_S = 3.0
_PAUSE_S = 2e-3
_VERSION = 20
# Parameters of the layers that `layer_costs` measures together, if the model has so many. A single layer would
# stay in the processor's caches, where a whole model's layers preempt each other.
_PARAMS_BEYOND_CACHES = 32 << 20
# Sizes of the steps that `layer_costs` measures: sequences that decode, and tokens of one prompt.
_DECODES = (1, 4, 8, 16, 64)
_PROMPTS = (32, 128)
# At these of `_DECODES`, what a rank does around a step is measured too.
_AROUND = (4, 16)
# In the place of the head and of callers. It computes until the process that started it ends or ends it.
_NEIGHBOUR = """
import os
parent = os.getppid()
while os.getppid() == parent:
    {str(number): number for number in range(20_000)}
"""
_What = tuple[str, StepPlan]
"""A quantity and its step: `bare`, with `layers`, with both these and draws (`drawn`), or what is around it: on a
`lone` stage, or on one in the `middle`."""


@dataclass(frozen=True, slots=True)
class ExpectedWorkload:
    """A typical request: tokens of its prompt and of its answer."""

    prompt: int
    new: int

    def step(self, max_positions: int) -> tuple[StepPlan, float]:
        """A step, and the share of its decodes that counts.

        DECODES sequences half way through their answers, and as many prompt tokens as new requests bring in that
        time; fewer decodes where those are too many tokens for one step. Long prompts with short answers have less
        than one decode in such a step: then one is there, and counts in part.
        """
        prompt = max(1, min(self.prompt, max_positions - 1))
        context = min(prompt + self.new // 2, max_positions - 1)
        num_prompt_tokens = min(DECODES * prompt / self.new, _MAX_PROMPT_TOKENS)
        wanted = num_prompt_tokens * self.new / prompt
        num_decodes = min(DECODES, max(1, round(wanted)))
        pieces = [(context, 1)] * num_decodes
        left = round(num_prompt_tokens)
        while left:
            num_tokens = min(left, prompt)
            pieces.append(((prompt - num_tokens) // 2, num_tokens))
            left -= num_tokens
        return _plan(pieces), wanted / num_decodes


def costs_for_split(
    config: ServeConfig, num_stages: int, checkpoint: Checkpoint, compute: Compute, tensor: int = 0
) -> PartCosts | None:
    """What `--layers auto` needs to know of this machine; None where there is nothing to decide. tensor: which of
    its stage's tensor ranks this is."""
    # Too many stages for the model: the head says so.
    cuts = 1 < num_stages <= checkpoint.architecture.num_layers
    if not cuts or config.pipeline.layers is not None:
        return None
    expected = config.scheduling
    mix = ExpectedWorkload(expected.expect_prompt, expected.expect_new)
    return step_costs(checkpoint, compute, mix, (tensor, config.pipeline.tensor_parallel))


def costs_for_shape(
    config: ServeConfig, world_size: int, checkpoint: Checkpoint, compute: Compute, local_rank: int
) -> dict[int, LayerCosts] | None:
    """What `--parallel auto` needs to know of this machine, by the number of tensor ranks; None: nobody asks."""
    if config.pipeline.parallel != "auto":
        return None
    mix = ExpectedWorkload(config.scheduling.expect_prompt, config.scheduling.expect_new)
    most = min(world_size, checkpoint.architecture.num_heads)
    counts = [count for count in range(1, most + 1) if world_size % count == 0]
    num_neighbours = _num_neighbours(local_rank, compute.stages_here)
    return {count: layer_costs(checkpoint, compute, mix, count, num_neighbours) for count in counts}


def _num_neighbours(local_rank: int, num_ranks: int) -> int:
    """How many busy processes a rank of this host has beside it while it measures: two in all, as head and callers
    are two. But two ranks, which disturb each other as well, have one."""
    return 2 if num_ranks == 1 else int(local_rank in (0, 2))


def step_costs(
    checkpoint: Checkpoint, compute: Compute, mix: ExpectedWorkload, part: tuple[int, int] = (0, 1)
) -> PartCosts:
    """Seconds of each part in one step of this mix; from the file if measured before. part: which tensor rank of
    how many; the others are not waited for."""
    return _remembered(
        PartCosts, checkpoint, compute, (mix, part), lambda: _measure(checkpoint, compute, mix, part)
    )


def layer_costs(
    checkpoint: Checkpoint, compute: Compute, mix: ExpectedWorkload, num_tensor: int = 1, num_neighbours: int = 1
) -> LayerCosts:
    """Seconds of a layer and of the head by the step's size; from the file if measured before. num_tensor: on the
    first of so many tensor ranks, which does not wait for the others.

    All ranks of a host measure at the same time, and the file is named for their number and for the neighbours:
    how they slow each other down is part of the costs. num_neighbours: so many processes are busy all the time
    beside a rank of one thread. Waits for a core, where there are more ranks than cores, are not included: they
    depend on the shape.
    """
    what = (mix, compute.stages_here, num_tensor, num_neighbours)
    fit = partial(_fit, checkpoint, compute, mix, num_tensor, num_neighbours)
    return _remembered(LayerCosts, checkpoint, compute, what, fit)


Costs = TypeVar("Costs")


def _remembered(
    kind: type[Costs], checkpoint: Checkpoint, compute: Compute, what: object, measure: Callable[[], Costs]
) -> Costs:
    path = _memory_path(checkpoint.architecture, compute, (kind.__name__, what))
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(path.read_bytes(), type=kind)
    costs = measure()
    with contextlib.suppress(OSError):  # a cache that cannot be written costs seconds, not service
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_bytes(msgspec.json.encode(costs))
        scratch.replace(path)
    return costs


def _memory_path(arch: Architecture, compute: Compute, what: object) -> Path:
    """One file per machine, model shape, arithmetic, operators and number of threads."""
    by = compute.reference, compute.options.batch_invariant
    numbers = compute.dtype, compute.quantization, compute.kv_dtype, *by
    of = (_VERSION, arch, numbers, compute.name, platform.processor(), torch.__version__, what)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "ppserve" / f"costs-{hashlib.sha256(repr(of).encode()).hexdigest()[:16]}.json"


def _measure(checkpoint: Checkpoint, compute: Compute, mix: ExpectedWorkload, part: tuple[int, int]) -> PartCosts:
    plan, share = mix.step(checkpoint.architecture.max_positions)
    silent = _silent(plan)
    bare, attention, layer = (_stage(checkpoint, compute, _whole(count, *part), plan) for count in (0, 1, 2))
    # The fastest of several, which others on the machine disturbed least.
    embed_and_draw_s, embed_s = min(_times(bare, plan)), min(_times(bare, silent))
    attend_s, whole_layer_s = (min(_times(stage, silent)) for stage in (attention, layer))
    # Noise may make a part that costs next to nothing seem to cost less.
    return PartCosts(
        attention=max(attend_s - embed_s, 1e-9),
        mlp=max(whole_layer_s - attend_s, 1e-9),
        embedding=embed_s,
        head=share * max(embed_and_draw_s - embed_s, 0.0),
    )


def _fit(
    checkpoint: Checkpoint, compute: Compute, mix: ExpectedWorkload, num_tensor: int, num_neighbours: int
) -> LayerCosts:
    longest = checkpoint.architecture.max_positions - 1
    context = min(mix.prompt + mix.new // 2, longest)
    decodes = [_plan([(context, 1)] * count) for count in _DECODES]
    prompts = [_plan([(0, min(tokens, longest))]) for tokens in _PROMPTS]
    arch = checkpoint.architecture
    num_layers = min(arch.num_layers, -(-_PARAMS_BEYOND_CACHES // (arch.attention_params + arch.mlp_params)))
    layouts = (_whole(2 * count, 0, num_tensor) for count in (0, num_layers))
    bare, whole = (_stage(checkpoint, compute, layout, *decodes, *prompts) for layout in layouts)
    # One thread's own time, where it computes alone: whatever else runs, waits for a core are not in it.
    alone = compute.device.type == "cpu" and compute.threads == 1
    seconds = _thread_s if alone else _wall_s
    measures: dict[_What, Callable[[], float]] = {}
    with contextlib.ExitStack() as held:
        # The head and callers compute beside the ranks that serve. On a core whose other hyperthread computes or
        # that another process has just used, a step takes up to a third longer.
        for _ in range(num_neighbours if alone else 0):
            held.enter_context(step_overhead.process(_NEIGHBOUR))
        for plan in decodes + prompts:
            silent = _silent(plan)
            measures["bare", plan] = partial(seconds, bare, silent)
            measures["layers", plan] = partial(seconds, whole, silent)
            if num_drawn := StepSize.of(plan).sampled:
                # Behind the layers: on its own, the head's weights and its inputs would be in nearer caches.
                measures["drawn", plan] = partial(seconds, whole, plan)
                # The shapes' ranks do the same around a step, whatever they compute in it.
                if num_drawn in _AROUND and num_tensor == 1:
                    own_s = partial(_drawing_s, bare, plan)
                    measures["lone", plan] = held.enter_context(step_overhead.on_lone_stage(bare, plan, own_s))
                    middle = _stage(checkpoint, compute, replace(bare.layout, stage=1, num_stages=3), plan)
                    measures["middle", plan] = held.enter_context(step_overhead.on_middle_stage(middle, plan))
        taken = _by_turns(measures)
    return _fitted(num_layers, taken)


def _by_turns(measures: dict[_What, Callable[[], float]]) -> dict[_What, list[float]]:
    """Each measured once in each of many short turns: a machine is half as fast again in some seconds as in
    others, and so all are measured in the same seconds. The first turn does not count."""
    taken: dict[_What, list[float]] = {what: [] for what in measures}
    for measure in measures.values():
        measure()
    until_s = time.monotonic() + _TURNS_S
    while time.monotonic() < until_s or len(taken[next(iter(taken))]) < _REPEATS:
        for what, measure in measures.items():
            taken[what].append(measure())
    return taken


def _fitted(num_layers: int, taken: dict[_What, list[float]]) -> LayerCosts:
    """Medians over the turns, of steps and of differences of steps in the same turn. A line is fitted to whole
    steps: small differences that others disturb may seem to be next to nothing, and would weigh most in a fit of
    relative errors."""
    layers, heads, whole_s, heads_s = StageCost(), StageCost(), {}, {}
    bare_s = fmean(median(seconds) for (kind, _), seconds in taken.items() if kind == "bare")
    for (kind, plan), seconds in taken.items():
        size = StepSize.of(plan)
        if kind == "layers":
            whole_s[replace(size, sampled=0)] = median(seconds)
            layers.observe(replace(size, sampled=0), median(seconds))
        elif kind == "drawn":
            more_s = median(drawn - silent for drawn, silent in zip(seconds, taken["layers", plan], strict=True))
            heads_s[StepSize(sampled=size.sampled)] = max(0.0, more_s)
            heads.observe(StepSize(sampled=size.sampled), bare_s + max(0.0, more_s))
    layer, head = (
        replace(fit.coefficients, step=max(0.0, fit.coefficients.step - bare_s)) for fit in (layers, heads)
    )
    # Of each step, what it took beyond the line.
    layer_bends = {of.rows: (s - bare_s - layer.seconds(of)) / num_layers for of, s in whole_s.items()}
    head_bends = {of.sampled: s - head.seconds(of) for of, s in heads_s.items()}
    lone_s, middle_s = (
        fmean([median(seconds) for (kind, _), seconds in taken.items() if kind == which] or [0.0])
        for which in ("lone", "middle")
    )
    return LayerCosts(
        layer.times(1 / num_layers),
        head,
        middle_s,
        tuple(sorted(layer_bends.items())),
        tuple(sorted(head_bends.items())),
        max(0.0, lone_s - middle_s),
    )


def _plan(rows: list[tuple[int, int]]) -> StepPlan:
    """A step of one slice per (start, tokens), each with blocks of its own; single tokens are drawn from."""
    slices, used = [], 0
    for number, (start, num_tokens) in enumerate(rows):
        num_blocks = -(-(start + num_tokens) // _BLOCK_SIZE)
        table = tuple(range(used, used + num_blocks))
        used += num_blocks
        draw = Draw(SamplingParams(seed=number, temperature=0.8)) if num_tokens == 1 else None
        slices.append(Slice(number, start, (1,) * num_tokens, table, draw))
    return StepPlan(0, 0, 0, tuple(slices))


def _silent(plan: StepPlan) -> StepPlan:
    """The step without drawing: no row goes through the head."""
    return replace(plan, slices=tuple(replace(piece, draw=None) for piece in plan.slices))


def _whole(num_sublayers: int, tensor: int = 0, num_tensor: int = 1) -> StageLayout:
    """A whole pipeline with the first sublayers only, as if the model had no others."""
    return StageLayout(0, 1, 0, num_sublayers, tensor, num_tensor)


def _stage(checkpoint: Checkpoint, compute: Compute, layout: StageLayout, *plans: StepPlan) -> Stage:
    """With room for these plans."""
    model = GPT2Stage.load(checkpoint, layout, compute.backend(compute.dtype))
    num_blocks = 1 + max(block for plan in plans for piece in plan.slices for block in piece.block_table)
    cache = model.backend.make_cache(model.arch, layout, num_blocks, _BLOCK_SIZE)
    # Memory that was never written reads as one page of zeros, from the nearest cache.
    cache.fill(0.01)
    (alone,) = connect((Frames(model.arch.width, model.backend.precision.hidden, device=compute.device),))
    gather = pretend_ranks(layout.tensor, layout.num_tensor, compute.device.type == "cpu")
    return Stage(model, cache, alone, gather)


def _times(stage: Stage, plan: StepPlan) -> list[float]:
    """Seconds of a step, several times, after one that does not count."""
    stage.step(plan, 0)
    stamps = [stage.step(plan, 0).result.stamps for _ in range(_REPEATS)]
    return [(times.ended - times.begun) / 1e9 for times in stamps]


def _wall_s(stage: Stage, plan: StepPlan) -> float:
    stamps = stage.step(plan, 0).result.stamps
    return (stamps.ended - stamps.begun) / 1e9


def _thread_s(stage: Stage, plan: StepPlan) -> float:
    """Of this thread. Before the step it sleeps, as it does where it serves: steps right behind each other find
    everything in the caches, and are up to a third faster."""
    time.sleep(_PAUSE_S)
    begun_s = time.thread_time()
    stage.step(plan, 0)
    return time.thread_time() - begun_s


def _drawing_s(bare: Stage, plan: StepPlan) -> float:
    return _thread_s(bare, plan) - _thread_s(bare, _silent(plan))
