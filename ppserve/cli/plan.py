"""`ppserve plan`: what would run where, and with --simulate how fast, without reading weights."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ppserve.bench.workload import clip, read_trace
from ppserve.cli.output import say
from ppserve.cli.types import COUNTS, LAYERS, SIZE, AutoOr, Number, Parsed
from ppserve.config import DTYPES, KV_DTYPES, QUANTIZATIONS
from ppserve.core.architecture import Architecture
from ppserve.core.grid import RankGrid
from ppserve.core.partition import check_tensor_ranks
from ppserve.errors import ConfigError
from ppserve.model.checkpoint.opening import read_architecture
from ppserve.planning.forecast import Forecast, Intent, forecast, render
from ppserve.planning.machine import Device, Wires
from ppserve.planning.scenarios import (
    MeasuredCosts,
    SimulatedLoad,
    fixed_load,
    read_costs,
    render_outcomes,
)
from ppserve.planning.shapes import Conditions, prospect, prospects, render_prospects, shapes
from ppserve.planning.simulator import SimulatedRequest

_COUNT = click.IntRange(min=1)
_RANKS = click.IntRange(1, 4096)
_FACTOR = Number(1e-6, 1e6)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


_PREFIXES = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


def _quantity(what: str, unit: str, prefixes: str, least: float, most: float) -> Parsed:
    """A number with a decimal prefix and an optional unit: 312T, 900GB/s, 50us."""
    pattern = re.compile(rf"(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)([{prefixes}]?)(?:{unit})?", re.ASCII)

    def parse(text: str) -> float:
        match = pattern.fullmatch(text.strip().replace("µ", "u"))
        number = float(match[1]) * _PREFIXES[match[2]] if match else None
        if number is None or not least <= number <= most:
            raise ValueError(f"{text!r} is not a {what}")
        return number

    return Parsed(what, parse)


_SPEED = _quantity("rate from 1 to 1e30, such as 312T", r"(?:FLOPS|FLOP/s|B/s|/s)", "KMGTP", 1.0, 1e30)
_TIME = _quantity("time up to 1000 s, such as 50us", "s", "num", 0.0, 1e3)


# What all shapes of a world differ in, and what only a simulation asks for.
_OF_A_SHAPE = ("stages", "tensor_parallel", "replicas", "layers", "compare")
_OF_A_SIMULATION = (
    "compare", "requests", "concurrency", "trace", "time_scale", "max_num_seqs", "acceptance", "costs", "flops",
    "memory_bandwidth", "launch_time", "link_latency", "link_bandwidth", "gather_latency", "control_latency",
    "head_time",
)  # fmt: skip
_IN_COSTS = ("flops", "memory_bandwidth", "launch_time")
_IN_OVERHEADS = ("link_latency", "link_bandwidth", "control_latency", "head_time")


@click.command(context_settings={"show_default": True})
@click.option("--model", default="tiny", help="As for serve; of a directory only config.json is read.")
@click.option("--stages", type=_COUNT, default=1)
@click.option("--tensor-parallel", type=_COUNT, default=1, help="Ranks that compute each stage together.")
@click.option("--replicas", type=_COUNT, default=1, help="Whole pipelines behind one head.")
@click.option("--world", type=_RANKS, help="Compare all shapes of so many ranks: implies --simulate.")
@click.option("--layers", type=AutoOr(LAYERS), default="auto", help="Layers per stage, as 9,3 or 7.5,4.5.")
@click.option("--dtype", type=click.Choice(DTYPES), default="auto", help="auto = float32.")
@click.option("--quantization", type=click.Choice(QUANTIZATIONS), default="none", help="As for serve.")
@click.option("--kv-dtype", type=click.Choice(KV_DTYPES), default="auto", help="Of keys and values.")
@click.option("--max-model-len", type=_COUNT, help="Longest prompt + answer; unset = what the model allows.")
@click.option("--block-size", type=click.IntRange(1, 256), default=16, help="Tokens per KV block.")
@click.option("--stage-memory", type=SIZE, default="16G", help="Of one stage, for weights and KV cache.")
@click.option("--kv-cache-memory", type=SIZE, help="Per stage; unset = what the weights leave.")
@click.option("--expect-prompt", type=_COUNT, default=128, help="Typical prompt tokens.")
@click.option("--expect-new", type=_COUNT, default=128, help="Typical new tokens.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
@click.option("--simulate", "wants_simulation", is_flag=True, help="Predict throughput, latency and bubbles.")
@click.option("--compare", type=COUNTS, help="Simulate these numbers of stages as well, such as 1,2,4.")
@click.option("--requests", type=_COUNT, default=200, help="How many to simulate.")
@click.option("--concurrency", type=_COUNT, default=32, help="Callers with one request at a time.")
@click.option("--trace", type=_FILE, help="CSV with TIMESTAMP, ContextTokens, GeneratedTokens.")
@click.option("--time-scale", type=_FACTOR, default=1.0, help="2 = the trace twice as fast as recorded.")
@click.option("--max-num-seqs", type=_COUNT, default=256, help="Sequences running at once.")
@click.option("--acceptance", type=Number(0, 1), default=0.0, help="Right draft tokens, as with --speculate.")
@click.option("--costs", type=_FILE, help="A server's /costs.json, in place of speeds and times.")
@click.option("--flops", type=_SPEED, default="50G", help="Of one stage; the default is about one CPU core.")
@click.option("--memory-bandwidth", type=_SPEED, default="10GB/s", help="Of one stage.")
@click.option("--launch-time", type=_TIME, default="200us", help="Of a step, however small.")
@click.option("--link-latency", type=_TIME, default="50us", help="Between neighbours.")
@click.option("--link-bandwidth", type=_SPEED, default="10GB/s", help="Between neighbours.")
@click.option("--gather-latency", type=_TIME, default="20us", help="Between the tensor ranks of a stage.")
@click.option("--control-latency", type=_TIME, default="100us", help="Between head and stages, one way.")
@click.option("--head-time", type=_TIME, default="200us", help="The head's work per step.")
def plan(**flags: Any) -> None:
    """What would run where: layers, parameters, KV memory, balance. Reads no weights.

    With --simulate the real scheduler runs against the costs of your devices, and says what to expect.
    """
    _refuse_unused(flags)
    arch = read_architecture(flags["model"])
    check_tensor_ranks(arch, flags["tensor_parallel"])
    intent = Intent(
        num_stages=flags["stages"],
        num_tensor=flags["tensor_parallel"],
        layers=flags["layers"],
        dtype="float32" if flags["dtype"] == "auto" else flags["dtype"],
        **{
            name: flags[name]
            for name in (
                "quantization", "kv_dtype", "max_model_len", "block_size", "stage_memory", "kv_cache_memory",
                "expect_prompt", "expect_new",
            )
        },
    )  # fmt: skip
    if flags["world"] is not None:
        under = _conditions(arch, intent, flags)
        if sys.stderr.isatty():
            click.echo(f"simulating {len(shapes(flags['world'], arch))} shapes ...", err=True)
        found = prospects(arch, intent, flags["world"], under)
        say(json.dumps([each.figures for each in found]) if flags["as_json"] else render_prospects(found))
        return
    layout = forecast(arch, intent)
    simulated: dict[int, dict[str, Any]] = {}
    if flags["wants_simulation"]:
        for count in sorted({flags["stages"], *(flags["compare"] or ())}):
            # Another number of stages has the same model and memory, and the automatic split.
            own = intent if count == flags["stages"] else replace(intent, layers=None)
            simulated[count] = _simulate(arch, own, count, flags)
    if flags["as_json"]:
        grid = {name: flags[name] for name in ("tensor_parallel", "replicas")}
        more = {"simulated": simulated} if simulated else {}
        say(json.dumps(_as_json(flags["model"], layout) | grid | more))
        return
    say(render(flags["model"], layout) + _shape(flags))
    if simulated:
        say("\nsimulated:\n" + render_outcomes(simulated))


def _refuse_unused(flags: dict[str, Any]) -> None:
    """Raises ConfigError where a flag was given that this plan would not look at."""
    of_world = flags["world"] is not None
    _refuse(of_world, _OF_A_SHAPE, "--world compares all shapes")
    _refuse(not (of_world or flags["wants_simulation"]), _OF_A_SIMULATION, "is of a simulation: add --simulate")
    _refuse(flags["trace"] is not None, ("concurrency",), "--trace has its own arrivals")
    _refuse(flags["trace"] is None, ("time_scale",), "is of a --trace")
    _refuse(flags["costs"] is not None, _IN_COSTS, "the sheet of --costs has it")


def _refuse(applies: bool, names: Sequence[str], problem: str) -> None:
    """Raises ConfigError for the first of these flags that was given."""
    context = click.get_current_context()
    for name in names:
        if applies and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise ConfigError("--" + name.replace("_", "-"), problem)


def _shape(flags: dict[str, Any]) -> str:
    """What the table, which is of the first tensor rank of each stage of one replica, does not show; often ''."""
    tensor, stages, replicas = (flags[name] for name in ("tensor_parallel", "stages", "replicas"))
    if tensor * replicas == 1:
        return ""
    grid = f"{tensor} tensor ranks x {stages} stages x {replicas} replicas = {tensor * stages * replicas} ranks"
    return f"\n{grid}; the table is of the first tensor rank of each stage, in every replica"


def _simulate(arch: Architecture, intent: Intent, num_stages: int, flags: dict[str, Any]) -> dict[str, Any]:
    grid = RankGrid(flags["tensor_parallel"], flags["replicas"], num_stages)
    found = prospect(arch, intent, grid, _conditions(arch, intent, flags))
    if not found.fits:
        raise ConfigError("--kv-cache-memory", f"not one sequence of {found.plan.max_model_len} tokens fits")
    return found.figures


def _conditions(arch: Architecture, intent: Intent, flags: dict[str, Any]) -> Conditions:
    load = load_of(arch.context(intent.max_model_len), flags)
    wires = Wires(
        latency_s=flags["link_latency"],
        bandwidth=flags["link_bandwidth"],
        control_s=flags["control_latency"],
        return_s=flags["control_latency"],
        head_s=flags["head_time"],
        gather_s=flags["gather_latency"],
    )
    speed: Device | MeasuredCosts = Device(flags["flops"], flags["memory_bandwidth"], flags["launch_time"])
    if flags["costs"] is not None:
        speed = read_costs(flags["costs"])
        asked = 1 if flags["world"] is not None else flags["tensor_parallel"]
        if speed.tensor not in (1, asked):
            of = f"{flags['costs']} is of a server with {speed.tensor} tensor ranks in each stage"
            raise ConfigError("--costs", f"{of}: it says nothing of other numbers")
        if speed.wires is not None:
            _refuse(True, _IN_OVERHEADS, "the sheet of --costs has it")
            _refuse(speed.tensor > 1, ("gather_latency",), "the sheet of --costs has it")
            wires = speed.wires if speed.tensor > 1 else replace(speed.wires, gather_s=wires.gather_s)
    return Conditions(speed, wires, load, flags["max_num_seqs"], flags["acceptance"])


def load_of(max_model_len: int, flags: dict[str, Any]) -> SimulatedLoad:
    """The requests to simulate: a trace, cut to the context as `ppserve bench` cuts it, or equal requests."""
    if max_model_len < 2:
        raise ConfigError("--max-model-len", f"{max_model_len} has no room for a prompt and an answer")
    if flags["trace"]:
        rows = read_trace(flags["trace"], flags["requests"], flags["time_scale"])
        sizes = [clip(row.prompt_tokens, row.new_tokens, max_model_len) for row in rows]
        recorded = (SimulatedRequest(row.at_s, *size) for row, size in zip(rows, sizes, strict=True))
        return SimulatedLoad(tuple(recorded), None)
    prompt = min(flags["expect_prompt"], max_model_len - 1)
    new = min(flags["expect_new"], max_model_len - prompt)
    return fixed_load(flags["requests"], prompt, new, flags["concurrency"])


def _as_json(model: str, layout: Forecast) -> dict[str, Any]:
    return {
        "model": model,
        "dtype": layout.dtype,
        "quantization": layout.quantization,
        "kv_dtype": layout.kv_dtype,
        "parameters": layout.arch.num_params,
        "max_model_len": layout.max_model_len,
        "max_sequences": layout.max_sequences,
        "balance": {
            "decode": layout.decode_balance,
            "prefill": layout.prefill_balance,
            "mixed": layout.mixed_balance,
        },
        "split": [count / 2 for count in layout.split.sublayers],
        "stages": [
            {**asdict(stage), "layers": stage.layout.span, "max_tokens": stage.max_tokens}
            for stage in layout.stages
        ],
    }
