"""`ppserve plan`: what would run where. Reads no weights."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from ppserve.cli.flags import FLAGS, removed
from ppserve.cli.main import say
from ppserve.cli.types import COUNT, SIZE
from ppserve.core.architecture import Architecture
from ppserve.core.grid import RankGrid
from ppserve.core.partition import check_tensor_ranks
from ppserve.errors import ConfigError
from ppserve.model.checkpoint.opening import read_architecture
from ppserve.planning.fitting import check_fits
from ppserve.planning.forecast import Forecast, ForecastRequest, forecast, render

_OF_SERVE = (
    *("--model", "--tensor-parallel", "--replicas", "--layers", "--dtype", "--quantization", "--kv-dtype"),
    *("--max-model-len", "--block-size", "--kv-cache-memory"),
)


@click.command(
    short_help="Say what would run where, without weights.",
    params=[
        *(flag for flags in FLAGS.values() for flag in flags if flag.opts[0] in _OF_SERVE),
        *removed("--expect", "--world", "--costs"),
    ],
)
@click.option("--stages", type=COUNT, default=1, help="Stages of the pipeline.")
@click.option("--stage-memory", type=SIZE, default="16G", help="Memory of each stage for weights and KV cache.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
def plan(**flags: Any) -> None:
    """What would run where: layers, parameters, KV memory, balance. Reads no weights.

    Most flags are serve's. --dtype auto is float32 here, and --quantization auto is none; without
    --kv-cache-memory blocks take what the weights leave of --stage-memory. If the model does not fit, the exit
    code is 2, and one line says what would.
    """
    arch = read_architecture(flags["model"])
    check_tensor_ranks(arch, flags["tensor_parallel"])
    layout = forecast(arch, _forecast_request(arch, flags))
    if flags["as_json"]:
        grid = {name: flags[name] for name in ("tensor_parallel", "replicas")}
        say(json.dumps(_as_json(flags["model"], layout) | grid))
    else:
        say(render(flags["model"], layout) + _shape(flags))
    check_fits(layout, kv_follows=flags["kv_dtype"] == "auto")


def _forecast_request(arch: Architecture, flags: dict[str, Any]) -> ForecastRequest:
    """Read the flags. Raises ConfigError."""
    as_given = "layers", "max_model_len", "block_size", "stage_memory", "kv_cache_memory"
    dtype = "float32" if flags["dtype"] == "auto" else flags["dtype"]
    quantization = "none" if flags["quantization"] == "auto" else flags["quantization"]
    context = arch.context(flags["max_model_len"])
    if context < 2:
        raise ConfigError("--max-model-len", f"{context} has no room for a prompt and an answer")
    return ForecastRequest(
        num_stages=flags["stages"],
        quantization=quantization,
        num_tensor=flags["tensor_parallel"],
        dtype=dtype,
        kv_dtype=dtype if flags["kv_dtype"] == "auto" else flags["kv_dtype"],
        **{name: flags[name] for name in as_given},
    )


def _shape(flags: dict[str, Any]) -> str:
    grid = RankGrid(flags["tensor_parallel"], flags["replicas"], flags["stages"])
    if grid.tensor == grid.data == 1:
        return ""
    sizes = f"{grid.tensor} tensor ranks x {grid.pipeline} stages x {grid.data} replicas"
    return f"\n{sizes} = {grid.size} ranks; the table is of the first tensor rank of each stage, in every replica"


def _as_json(model: str, layout: Forecast) -> dict[str, Any]:
    return {
        "model": model,
        **{name: getattr(layout.request, name) for name in ("dtype", "quantization", "kv_dtype")},
        "parameters": layout.arch.num_params,
        **{name: getattr(layout, name) for name in ("max_model_len", "max_sequences", "balance")},
        "split": [count / 2 for count in layout.split.sublayers],
        "stages": [
            {**asdict(stage), "layers": stage.layout.span, "max_tokens": stage.max_tokens}
            for stage in layout.stages
        ],
    }
