"""Simulated runs for `ppserve plan --simulate`: devices by their speeds or by measured costs, and reports."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from ppserve.core.architecture import (
    MAX_LAYERS,
    Split,
    StageLayout,
    count_sublayers,
    stage_layouts,
    sublayer_params,
)
from ppserve.core.cost_model import Coefficients, LayerCosts
from ppserve.core.figures import percentile, table
from ppserve.core.ledger.causes import CAUSES
from ppserve.core.ledger.overheads import OverheadTimes
from ppserve.core.scheduling.config import MAX_PROMPT_TOKENS_PER_STEP, SchedulerConfig
from ppserve.errors import ConfigError
from ppserve.planning.cores import Cores
from ppserve.planning.forecast import ELEMENT_BYTES, Forecast
from ppserve.planning.machine import Device, Machine, Roofline, StageSpeed, TensorRank, Wires
from ppserve.planning.simulator import Outcome, SimulatedHead, SimulatedRequest, Simulator


@dataclass(frozen=True, slots=True)
class SimulatedLoad:
    """What arrives. concurrency: requests in the server at any time; None: each comes at its own `arrival_s`."""

    requests: tuple[SimulatedRequest, ...]
    concurrency: int | None


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Of one rank, learnt from a running server or measured before it runs. overheads: around computing. shared:
    of one of so many tensor ranks, where it was measured; elsewhere its share is taken from `parts`.

    spread: root mean square of the steps' relative deviation from the coefficients. max_chunk: prompt tokens that
    the server puts into a step at most; None: unknown. tensor: ranks of each stage of the server that was
    measured; if several, the costs are of such a rank and contain its waiting for the others.
    """

    parts: LayerCosts
    overheads: OverheadTimes | None = None
    spread: float = 0.0
    max_chunk: int | None = None
    shared: dict[int, LayerCosts] = field(default_factory=dict)
    tensor: int = 1

    @property
    def wires(self) -> Wires | None:
        """The overheads around computing; None when the sheet has none. The bandwidth of links is unlimited."""
        o = self.overheads
        if o is None:
            return None
        wires = Wires(
            latency_s=o.transfer_s,
            bandwidth=float("inf"),
            control_s=o.control_s,
            return_s=o.return_s,
            head_s=o.head_s,
            prepare_s=o.prepare_s,
            sending_s=o.sending_s,
        )
        return wires if self.tensor == 1 else replace(wires, gather_s=0.0)


def fixed_load(num_requests: int, prompt: int, new: int, concurrency: int) -> SimulatedLoad:
    """`concurrency` callers, each with one request at a time; all requests have the same numbers of tokens."""
    return SimulatedLoad((SimulatedRequest(0.0, prompt, new),) * num_requests, min(concurrency, num_requests))


def simulate(
    plan: Forecast,
    speed: Device | MeasuredCosts,
    wires: Wires,
    load: SimulatedLoad,
    num_seqs: int,
    acceptance: float = 0.0,
) -> Outcome:
    """What comes of `load` in the pipeline of `plan`; the rest as for `asked`."""
    head = SimulatedHead()
    replica = asked(plan, speed, wires, load, num_seqs, acceptance, head)
    head.clock.run()
    return replica.end()


def asked(
    plan: Forecast,
    speed: Device | MeasuredCosts,
    wires: Wires,
    load: SimulatedLoad,
    num_seqs: int,
    acceptance: float = 0.0,
    head: SimulatedHead | None = None,
    on: tuple[tuple[Cores, ...], ...] = (),
) -> Simulator:
    """`load`, to be run through the pipeline of `plan`. acceptance: the share of drafted tokens that are right, 0:
    no draft tokens. head: others may share it. on: as in `Machine`. Raises ConfigError when nothing fits into its
    memory."""
    if plan.max_sequences < 1:
        raise ConfigError("--kv-cache-memory", f"not one sequence of {plan.max_model_len} tokens fits")
    blocks_per_sequence = -(-plan.max_model_len // 16)
    spread, max_chunk = (speed.spread, speed.max_chunk) if isinstance(speed, MeasuredCosts) else (0.0, None)
    machine = Machine(
        stages=tuple(_stage_speed(plan, i, speed, wires) for i in range(len(plan.stages))),
        wires=replace(wires, bytes_per_row=plan.arch.width * ELEMENT_BYTES[plan.dtype]),
        num_blocks=min(plan.max_sequences, num_seqs) * blocks_per_sequence,
        delayed=_scattered(spread),
        on=on,
    )
    config = SchedulerConfig(
        num_stages=len(plan.stages),
        max_num_seqs=num_seqs,
        max_queue=len(load.requests) + 1,
        max_queue_tokens=len(load.requests) * plan.max_model_len + 1,
        max_model_len=plan.max_model_len,
        max_auto_chunk=max_chunk or MAX_PROMPT_TOKENS_PER_STEP,
        prefix_cache=False,
        runs_ahead=len(plan.stages) == plan.stages[0].layout.num_tensor == 1,
    )
    simulator = Simulator(machine, config, machine, acceptance, head=head)
    simulator.ask(load.requests, load.concurrency)
    return simulator


def _scattered(spread: float) -> Callable[[float], float]:
    """Scatters times by `spread` around the same mean (log-normal: never negative); from a fixed seed."""
    rng = random.Random(0)
    return lambda seconds: seconds * math.exp(rng.gauss(-spread * spread / 2, spread))


def _stage_speed(plan: Forecast, stage: int, speed: Device | MeasuredCosts, wires: Wires) -> StageSpeed:
    layout, arch = plan.stages[stage].layout, plan.arch
    own = _own_speed(plan, stage, speed)
    if layout.num_tensor == 1:
        return own
    sublayers = 2 * arch.width * len(layout.attentions) + (arch.inner_width + arch.width) * len(layout.mlps)
    gathered = arch.width * layout.is_first + sublayers
    others = 1 - 1 / layout.num_tensor
    row_s = others * gathered * ELEMENT_BYTES[plan.dtype] / wires.bandwidth
    # The embedding gathers its columns, each attention its heads and its result, each MLP its inner rows and its
    # result, the head its draws.
    num_gathers = layout.is_first + 2 * layout.num_sublayers + layout.is_last
    return TensorRank(own, num_gathers * wires.gather_s, row_s)


def _own_speed(plan: Forecast, stage: int, speed: Device | MeasuredCosts) -> StageSpeed:
    layout, arch = plan.stages[stage].layout, plan.arch
    params = sublayer_params(arch, layout)
    if isinstance(speed, MeasuredCosts):
        if (own := speed.shared.get(layout.num_tensor)) is not None:
            return own.stage(layout)
        return speed.parts.stage(layout).times(params / sublayer_params(arch, replace(layout, num_tensor=1)))
    element = ELEMENT_BYTES[plan.dtype if plan.quantization == "none" else plan.quantization]
    head = layout.cut(arch.vocab_size).width * arch.width if layout.is_last else 0
    return Roofline(
        device=speed,
        weight_bytes=params * element,
        flops_per_row=2 * params,
        kv_bytes_per_token=plan.stages[stage].kv_bytes_per_token,
        head_bytes=head * element,
        head_flops=2 * head,
    )


# ---- measured costs ----------------------------------------------------------------------------------------


# Fewer do not tell what a row costs, and what a key.
_ENOUGH_STEPS = 50


def read_costs(path: Path) -> MeasuredCosts:
    """The costs that a server measured, from its /costs.json or its topology as JSON. Raises ConfigError.

    /costs.json: {"stages": [{"layers": 9, "step_s": ..., "row_s": ..., "key_s": ..., "sample_s": ...,
    "spread": 0.1}, ...], "tensor": 1, "max_chunk": 128, "overheads": {"head_s": ..., ...}}. A topology knows only
    the mean time of a step: then all simulated steps of a stage take the same time.
    """
    try:
        sheet = json.loads(path.read_text())
        entries = [entry for entry in sheet["stages"] if not entry.get("replica")]  # they all cost the same
        tensor = int(sheet.get("tensor", max(1, *(len(entry.get("ranks", ())) for entry in entries), 1)))
        split = Split(tuple(_num_sublayers(e) for e in entries))
        stages = [_coefficients(e) for e in entries]
        if not stages or not all(2 <= count <= 2 * MAX_LAYERS for count in split.sublayers):
            raise ConfigError("--costs", f"{path} describes no stages")
        layouts = stage_layouts(split)
        num_steps = min(int(entry.get("steps", _ENOUGH_STEPS)) for entry in entries)
        if num_steps < _ENOUGH_STEPS or not all(any((c.step, c.row, c.key, c.sample)) for c in stages):
            raise ConfigError("--costs", f"{path}: its server had computed hardly a step: give it a load first")
        overheads = OverheadTimes(**sheet["overheads"]) if "overheads" in sheet else None
        spread = fmean(float(entry.get("spread", 0.0)) for entry in entries)
        max_chunk = int(sheet["max_chunk"]) if "max_chunk" in sheet else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ConfigError("--costs", f"{path} is no cost sheet: {type(error).__name__}: {error}") from None
    if not 0 <= spread < math.inf or (max_chunk is not None and max_chunk < 1) or tensor < 1:
        odd = f"spread {spread}, max_chunk {max_chunk}, tensor {tensor}"
        raise ConfigError("--costs", f"{path} is no cost sheet: {odd}")
    parts = _parts(stages, layouts)
    return MeasuredCosts(parts, overheads, spread, max_chunk, {tensor: parts}, tensor)


def _num_sublayers(entry: dict[str, Any]) -> int:
    parts = entry.get("numLayers", entry.get("num_layers"))
    if parts is None:
        return count_sublayers(float(entry["layers"]))
    # A topology counts layers of which the stage has any part; its words tell the half ones (`0-7a`, `7m-11`).
    cut = sum(half in entry.get("layers", "") for half in "am")
    return count_sublayers(float(parts)) - cut


def _coefficients(entry: dict[str, Any]) -> Coefficients:
    if "step_s" in entry:
        return Coefficients(*(float(entry[key]) for key in ("step_s", "row_s", "key_s", "sample_s")))
    measured = entry["measuredStepSeconds"] if "measuredStepSeconds" in entry else entry["measured_step_seconds"]
    return Coefficients(float(measured))


def _parts(stages: list[Coefficients], layouts: tuple[StageLayout, ...]) -> LayerCosts:
    """All stages but the last give the cost of a layer; what the last takes beyond its layers is the head."""
    without_head = range(max(1, len(stages) - 1))
    num_layers = sum(layouts[i].layer_weights for i in without_head)
    num_attentions = sum(len(layouts[i].attentions) for i in without_head)

    def total(of: Callable[[Coefficients], float]) -> float:
        return sum(of(stages[i]) for i in without_head)

    # In decode every row is sampled, so the fit cannot separate the two; before the last stage they are added.
    layer = Coefficients(
        total(lambda c: c.step) / num_layers,
        total(lambda c: c.row + (c.sample if len(stages) > 1 else 0)) / num_layers,
        total(lambda c: c.key) / num_attentions,
    )
    last, own = stages[-1], layouts[-1].layer_weights
    beyond_row = last.row - layer.row * own
    head = Coefficients(
        step=max(0.0, last.step - layer.step * own),
        sample=max(0.0, last.sample + beyond_row) if len(stages) > 1 else last.sample,
    )
    return LayerCosts(layer, head)


# ---- as text -----------------------------------------------------------------------------------------------


def summary(outcome: Outcome) -> dict[str, Any]:
    """The outcome in numbers: seconds, rates per second, and shares of the time with work."""
    stages = [
        {"busy": times.busy_share, **{cause: times.bubble_share(cause) for cause in CAUSES}}
        for times in outcome.stages
    ]
    latencies = {"ttft_s": outcome.ttft_s, "itl_s": outcome.itl_s, "e2e_s": outcome.duration_s}
    return {
        "requests": len(outcome.duration_s),
        "duration_s": outcome.wall_s,
        "steps": outcome.num_steps,
        "requests_per_s": outcome.requests_per_s,
        "output_tokens_per_s": outcome.output_tokens_per_s,
        "total_tokens_per_s": (outcome.new_tokens + outcome.prompt_tokens) / outcome.wall_s,
        **{f"{name}_p{p}": percentile(values, p) for name, values in latencies.items() for p in (50, 99)},
        "stages": stages,
    }


_LATENCIES = (("TTFT", "ttft_s"), ("ITL", "itl_s"), ("E2E", "e2e_s"))
_FIGURES = (
    *(("requests/s", "requests_per_s", 1.0), ("output tokens/s", "output_tokens_per_s", 1.0)),
    *((f"{name} p{p} (ms)", f"{key}_p{p}", 1e3) for name, key in _LATENCIES for p in (50, 99)),
)


def render_outcomes(numbers: dict[int, dict[str, Any]]) -> str:
    """One column per number of stages, then where the stages' time went. numbers: as `summary` gives them."""
    rows = [
        ("stages", *(str(stages) for stages in numbers)),
        *((title, *(f"{n[key] * scale:.4g}" for n in numbers.values())) for title, key, scale in _FIGURES),
    ]
    for what in ("busy", *CAUSES):
        rows.append((f"{what} %", *(_range(n["stages"], what) for n in numbers.values())))
    return "\n".join([*table(*rows, left=1), "(shares of the time with work; a range spans the stages)"])


def _range(stages: list[dict[str, float]], what: str) -> str:
    low, high = (100 * pick(stage[what] for stage in stages) for pick in (min, max))
    return f"{low:.0f}" if round(low) == round(high) else f"{low:.0f}-{high:.0f}"
