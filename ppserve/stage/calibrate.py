"""What the parts of a model cost on this machine, measured before it is cut: for `--layers auto`.

What is measured is the step that a busy server computes all the time: sequences decoding, and beside them as many
prompt tokens as new requests bring meanwhile. (Prompts and decodes measured apart and added up count the reading
of the weights twice.) Small pipelines of one stage run it, of one, two and three sublayers (attention, MLP,
attention): their differences are an MLP and an attention, what is left is the embedding, and reading out is the
head with sampling. It takes seconds, and is remembered per machine and model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ppserve.core.architecture import Architecture, StageLayout
from ppserve.core.partition import Parts
from ppserve.core.plan import Draw, Slice, StepPlan
from ppserve.core.request import SamplingParams
from ppserve.model.checkpoint import Checkpoint
from ppserve.model.cpu.kv_cache import KVCache
from ppserve.model.gpt2 import GPT2Stage
from ppserve.model.inputs import build_inputs
from ppserve.stage.device import Compute

DECODES = 16
_BLOCK_SIZE = 16
_MAX_PROMPT_TOKENS = 128
_REPEATS = 7
_VERSION = 5


@dataclass(frozen=True, slots=True)
class Mix:
    """A typical request: tokens of its prompt and of its answer."""

    prompt: int
    new: int

    def step(self, max_positions: int) -> tuple[StepPlan, float]:
        """DECODES sequences half way through their answers, and the prompt tokens that keep up with them; fewer
        decodes where those would be too many for one step. And how many of its decodes count: of long prompts
        and short answers less than one would be right."""
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


def step_costs(checkpoint: Checkpoint, compute: Compute, mix: Mix) -> Parts:
    """Seconds of each part in one step of this mix, of a model of two blocks or more; from memory if known."""
    path = _memory_path(checkpoint.architecture, compute, mix)
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Parts(**json.loads(path.read_text()))
    costs = _measure(checkpoint, compute, mix)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs seconds, not service
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(asdict(costs)))
        scratch.replace(path)
    return costs


def _memory_path(arch: Architecture, compute: Compute, mix: Mix) -> Path:
    """One file per machine, model shape, arithmetic and number of threads."""
    what = (_VERSION, arch, compute.dtype, compute.name, platform.processor(), torch.__version__, mix)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "ppserve" / f"costs-{hashlib.sha256(repr(what).encode()).hexdigest()[:16]}.json"


@torch.inference_mode()
def _measure(checkpoint: Checkpoint, compute: Compute, mix: Mix) -> Parts:
    plan, share = mix.step(checkpoint.architecture.max_positions)
    forward_s, read_out_s = [], 0.0
    for num_sublayers in (1, 2, 3):
        # As if the model had no others: `load` reads only what the layout names.
        whole = StageLayout(0, 1, 0, num_sublayers)
        model = GPT2Stage.load(checkpoint, whole, compute.dtype, compute.device, lambda done, total: None)
        seconds, read_out_s = _time(model, plan, compute)
        forward_s.append(seconds)
        del model
    mlp_s = max(forward_s[1] - forward_s[0], 1e-9)
    attention_s = max(forward_s[2] - forward_s[1], 1e-9)
    return Parts(attention_s, mlp_s, max(forward_s[0] - attention_s, 0.0), share * read_out_s)


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


def _time(model: GPT2Stage, plan: StepPlan, compute: Compute) -> tuple[float, float]:
    """Seconds of (forward, read_out): the fastest of several, which others on the machine disturbed least."""
    num_blocks = 1 + max(block for piece in plan.slices for block in piece.block_table)
    cache = KVCache(model.arch, model.layout, num_blocks, _BLOCK_SIZE, compute.dtype, compute.device)
    # Memory that was never written reads as one page of zeros, from the nearest cache.
    cache.keys_LBHdp.fill_(0.01)
    cache.values_LBHpd.fill_(0.01)
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
    return min(forward), min(read_out)
