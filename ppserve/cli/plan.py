"""`ppserve plan`: what would run where and, with measured costs, how fast. Reads no weights."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import click
from click.core import ParameterSource

from ppserve.cli.flags import FLAGS
from ppserve.cli.main import say
from ppserve.cli.types import COUNT, FILE, SIZE
from ppserve.core.architecture import Architecture
from ppserve.core.cost_model import StepSize
from ppserve.core.grid import RankGrid
from ppserve.core.partition import ExpectedWorkload, check_tensor_ranks
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.errors import ConfigError
from ppserve.model.checkpoint.opening import read_architecture
from ppserve.planning.forecast import Forecast, Intent, forecast, render
from ppserve.planning.shapes import LATENCY_S, Conditions, compare, render_prospects
from ppserve.planning.simulator import CostSheet, Simulator, read_costs, render_outcome

_REQUESTS_PER_CALLER = 6  # simulated; enough that the first and the last weigh little
_OF_SERVE = (
    *("--model", "--tensor-parallel", "--replicas", "--layers", "--dtype", "--quantization", "--kv-dtype"),
    *("--max-model-len", "--block-size", "--kv-cache-memory", "--expect"),
)


@click.command(
    params=[flag for flags in FLAGS.values() for flag in flags if flag.opts[0] in _OF_SERVE],
)
@click.option("--stages", type=COUNT, default=1, help="Stages of the pipeline.")
@click.option("--world", type=click.IntRange(1, 4096), help="Compare all shapes of so many ranks.")
@click.option("--stage-memory", type=SIZE, default="16G", help="Of a stage, for weights and KV cache.")
@click.option("--costs", type=FILE, help="/costs.json of a server: predict throughput, latency and bubbles.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
def plan(**flags: Any) -> None:
    """What would run where: layers, parameters, KV memory, balance. Reads no weights.

    Most flags are serve's. --dtype auto is float32 here; without --kv-cache-memory blocks take what the weights
    leave of --stage-memory.

    With --costs it also says how fast: for all shapes by a formula, for one pipeline by the real scheduler.
    """
    arch = read_architecture(flags["model"])
    check_tensor_ranks(arch, flags["tensor_parallel"])
    intent = _intent(arch, flags)
    sheet = read_costs(flags["costs"], arch) if flags["costs"] is not None else None
    if flags["world"] is not None:
        _refuse_shape_flags()
        found = compare(arch, intent, flags["world"], _conditions(arch, sheet) if sheet is not None else None)
        say(json.dumps([each.figures for each in found]) if flags["as_json"] else render_prospects(found))
    else:
        _plan_one(arch, intent, sheet, flags)


def _plan_one(arch: Architecture, intent: Intent, sheet: CostSheet | None, flags: dict[str, Any]) -> None:
    """One pipeline, and with costs what it would do."""
    layout = forecast(arch, intent)
    callers = -(-intent.expect.callers // flags["replicas"])
    outcome = _simulate(layout, sheet, callers) if sheet is not None else None
    if flags["as_json"]:
        grid = {name: flags[name] for name in ("tensor_parallel", "replicas")}
        simulated = {} if outcome is None else {"simulated": outcome}
        say(json.dumps(_as_json(flags["model"], layout) | grid | simulated))
        return
    say(render(flags["model"], layout) + _shape(flags))
    if outcome is not None:
        say(f"\nsimulated, a pipeline with {callers} callers:\n{render_outcome(outcome)}")


def _intent(arch: Architecture, flags: dict[str, Any]) -> Intent:
    """Read the flags; the expected load is cut to the context. Raises ConfigError."""
    as_given = "layers", "quantization", "max_model_len", "block_size", "stage_memory", "kv_cache_memory"
    dtype = "float32" if flags["dtype"] == "auto" else flags["dtype"]
    context = arch.context(flags["max_model_len"])
    if context < 2:
        raise ConfigError("--max-model-len", f"{context} has no room for a prompt and an answer")
    expect: ExpectedWorkload = flags["expect"]
    prompt = min(expect.prompt, context - 1)
    return Intent(
        num_stages=flags["stages"],
        num_tensor=flags["tensor_parallel"],
        dtype=dtype,
        kv_dtype=dtype if flags["kv_dtype"] == "auto" else flags["kv_dtype"],
        expect=replace(expect, prompt=prompt, new=min(expect.new, context - prompt)),
        **{name: flags[name] for name in as_given},
    )


def _refuse_shape_flags() -> None:
    """Raises ConfigError for a flag that is for one shape."""
    for name in ("stages", "tensor_parallel", "replicas", "layers"):
        if click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise ConfigError(f"--{name.replace('_', '-')}", "--world compares all shapes")


def _shape(flags: dict[str, Any]) -> str:
    grid = RankGrid(flags["tensor_parallel"], flags["replicas"], flags["stages"])
    if grid.tensor == grid.data == 1:
        return ""
    sizes = f"{grid.tensor} tensor ranks x {grid.pipeline} stages x {grid.data} replicas"
    return f"\n{sizes} = {grid.size} ranks; the table is of the first tensor rank of each stage, in every replica"


def _conditions(arch: Architecture, sheet: CostSheet) -> Conditions:
    over = sheet.overheads
    around_s = over.prepare_s + over.sending_s
    return Conditions(
        stage_s=lambda layout, step: around_s + sheet.stage(arch, layout).seconds(StepSize.from_plan(step)),
        latency_s=over.transfer_s or LATENCY_S,
        return_s=over.return_s + over.head_s + over.control_s,
    )


def _simulate(plan: Forecast, sheet: CostSheet, callers: int) -> dict[str, Any]:
    """The figures of a pipeline with its share of callers. Raises ConfigError."""
    if plan.max_sequences < 1:
        raise ConfigError("--kv-cache-memory", f"not one sequence of {plan.max_model_len} tokens fits")
    requests = _REQUESTS_PER_CALLER * callers
    config = SchedulerConfig(
        num_stages=len(plan.stages),
        max_queue=requests,
        max_queue_tokens=requests * plan.max_model_len,
        max_model_len=plan.max_model_len,
        max_auto_chunk=sheet.max_chunk,
        prefix_cache=False,
    )
    num_tokens = min(plan.tightest.max_tokens, callers * (plan.max_model_len + config.block_size))
    stages = [sheet.stage(plan.arch, stage.layout) for stage in plan.stages]
    simulator = Simulator(stages, sheet.overheads, config, num_tokens // config.block_size)
    return simulator.run(requests, plan.intent.expect.prompt, plan.intent.expect.new, callers).figures


def _as_json(model: str, layout: Forecast) -> dict[str, Any]:
    return {
        "model": model,
        **{name: getattr(layout.intent, name) for name in ("dtype", "quantization", "kv_dtype")},
        "parameters": layout.arch.num_params,
        **{name: getattr(layout, name) for name in ("max_model_len", "max_sequences", "balance")},
        "split": [count / 2 for count in layout.split.sublayers],
        "stages": [
            {**asdict(stage), "layers": stage.layout.span, "max_tokens": stage.max_tokens}
            for stage in layout.stages
        ],
    }
