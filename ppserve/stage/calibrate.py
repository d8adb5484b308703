"""What the parts of a model cost on this machine, measured before it is cut: for `--layers auto`.

Small pipelines of one stage are run, of one, two and three sublayers (attention, MLP, attention): their
differences are an MLP and an attention, what is left is the embedding, and reading out is the head with
sampling. It takes seconds, and is remembered per machine and model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from ppserve.core.architecture import Architecture, StageLayout
from ppserve.core.partition import MEASURED_DECODES, Parts, TokenCosts
from ppserve.core.plan import Draw, Slice, StepPlan
from ppserve.core.request import SamplingParams
from ppserve.model.checkpoint import Checkpoint
from ppserve.model.gpt2 import GPT2Stage
from ppserve.model.inputs import build_inputs
from ppserve.model.kv_cache import KVCache
from ppserve.stage.device import Compute

_BLOCK_SIZE = 16
_CHUNK = 256
_REPEATS = 5
_VERSION = 2


def token_costs(checkpoint: Checkpoint, compute: Compute, context: int) -> TokenCosts:
    """Seconds per token of each part, for prompts and for decoding at `context` tokens; from memory if known."""
    path = _memory_path(checkpoint.architecture, compute, context)
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        known = json.loads(path.read_text())
        return TokenCosts(Parts(**known["prefill"]), Parts(**known["decode"]))
    costs = _measure(checkpoint, compute, context)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs seconds, not service
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(asdict(costs)))
        scratch.replace(path)
    return costs


def _memory_path(arch: Architecture, compute: Compute, context: int) -> Path:
    """One file per machine, model shape, arithmetic and number of threads."""
    what = (_VERSION, arch, compute.dtype, compute.name, platform.processor(), torch.__version__, context)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "ppserve" / f"costs-{hashlib.sha256(repr(what).encode()).hexdigest()[:16]}.json"


@torch.inference_mode()
def _measure(checkpoint: Checkpoint, compute: Compute, context: int) -> TokenCosts:
    context = max(1, min(context, checkpoint.architecture.max_positions - 1))
    chunk = min(_CHUNK, context)
    decodes = _plan([(context, 1)] * MEASURED_DECODES)
    prompts = _plan([(0, chunk)])
    forward_s: dict[tuple[int, str], float] = {}
    read_out_s: dict[str, float] = {}
    for num_sublayers in (1, 2, 3):
        # As if the model had no others: `load` reads only what the layout names. Who cuts has two blocks.
        whole = StageLayout(0, 1, 0, num_sublayers)
        model = GPT2Stage.load(checkpoint, whole, compute.dtype, compute.device, lambda done, total: None)
        for name, plan in (("decode", decodes), ("prefill", prompts)):
            forward_s[num_sublayers, name], read_out_s[name] = _time(model, plan, compute)
        del model

    def parts(name: str, num_tokens: int, head_s: float) -> Parts:
        mlp_s = max(forward_s[2, name] - forward_s[1, name], 1e-9)
        attention_s = max(forward_s[3, name] - forward_s[2, name], 1e-9)
        embedding_s = max(forward_s[1, name] - attention_s, 0.0)
        return Parts(*(seconds / num_tokens for seconds in (attention_s, mlp_s, embedding_s, head_s)))

    return TokenCosts(
        prefill=parts("prefill", chunk, read_out_s["prefill"]),
        decode=parts("decode", MEASURED_DECODES, read_out_s["decode"]),
    )


def _plan(rows: list[tuple[int, int]]) -> StepPlan:
    """A step of one slice per (start, tokens), each with blocks of its own, its last row drawn."""
    slices, used = [], 0
    for number, (start, num_tokens) in enumerate(rows):
        num_blocks = -(-(start + num_tokens) // _BLOCK_SIZE)
        table = tuple(range(used, used + num_blocks))
        used += num_blocks
        draw = Draw(SamplingParams(seed=number, temperature=0.8))
        slices.append(Slice(number, start, (1,) * num_tokens, table, draw))
    return StepPlan(0, 0, 0, tuple(slices))


def _time(model: GPT2Stage, plan: StepPlan, compute: Compute) -> tuple[float, float]:
    """Median seconds of (forward, read_out), after one run to warm up."""
    num_blocks = 1 + max(block for piece in plan.slices for block in piece.block_table)
    cache = KVCache(model.arch, model.layout, num_blocks, _BLOCK_SIZE, compute.dtype, compute.device)
    inputs = build_inputs(plan, model.layout, _BLOCK_SIZE, compute.device)

    def clock(run: Callable[[], object]) -> float:
        begun_s = time.perf_counter()
        run()
        compute.synchronize()
        return time.perf_counter() - begun_s

    hidden_TD = model.forward(inputs, None, cache)
    model.read_out(plan, inputs, hidden_TD)
    forward = [clock(lambda: model.forward(inputs, None, cache)) for _ in range(_REPEATS)]
    read_out = [clock(lambda: model.read_out(plan, inputs, hidden_TD)) for _ in range(_REPEATS)]
    return statistics.median(forward), statistics.median(read_out)
