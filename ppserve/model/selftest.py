"""Does this machine keep the promise that a row does not feel its neighbours? Asked once, at start-up.

Our own kernels keep it by construction; a library's keep it where it was tried. So the question is put to
the stage's own weights and shapes: a few row counts, and one prompt at once, in chunks and token by token.
On the way every kernel is compiled (or read from its cache), so that no request waits for that.
"""

from __future__ import annotations

import torch

from ppserve.core.plan import Slice, StepPlan
from ppserve.model.gpt2 import GPT2Stage
from ppserve.model.inputs import build_inputs
from ppserve.model.kv_cache import KVCache
from ppserve.model.linear import Linear
from ppserve.model.sampling import warm_up

_ROW_COUNTS = (1, 2, 3, 5, 17, 64, 65, 128)
_HEAD_ROW_COUNTS = (1, 2, 3, 17)
_POSITIONS = 41
_BLOCK_SIZE = 16


@torch.inference_mode()
def check_determinism(stage: GPT2Stage) -> str | None:
    """None when every promise holds on this machine; else the reason in words. Takes well under a
    second, and on a machine's first start what compiling takes."""
    generator = torch.Generator().manual_seed(0)
    if stage.head is not None:
        warm_up()
    if stage.head is not None and (reason := _check_linear(stage, stage.head.linear, _HEAD_ROW_COUNTS, generator)):
        return f"the LM head: {reason}"
    if not stage.blocks:
        return None
    for linear in stage.blocks[0].linears:
        if reason := _check_linear(stage, linear, _ROW_COUNTS, generator):
            return f"a linear layer of {linear.num_inputs} inputs: {reason}"
    return _check_chunks(stage, generator)


def _check_linear(
    stage: GPT2Stage, linear: Linear, row_counts: tuple[int, ...], generator: torch.Generator
) -> str | None:
    """Whether the first rows come out the same with more rows after them."""
    x_TK = torch.randn(row_counts[-1], linear.num_inputs, generator=generator)
    x_TK = x_TK.to(stage.device, stage.compute_dtype)
    y_TN = linear(x_TK)
    for count in row_counts[:-1]:
        if not torch.equal(linear(x_TK[:count]), y_TN[:count]):
            return f"rows differ between {count} and {row_counts[-1]} rows at once"
    return None


def _check_chunks(stage: GPT2Stage, generator: torch.Generator) -> str | None:
    """Whether one block gives a prompt the same hidden states however it is cut."""
    x_TD = torch.randn(_POSITIONS, stage.arch.width, generator=generator).to(stage.device, stage.compute_dtype)
    whole_TD = _through_block(stage, x_TD, _POSITIONS)
    for chunk in (1, 7):
        if not torch.equal(_through_block(stage, x_TD, chunk), whole_TD):
            return f"hidden states differ between chunks of {chunk} and the whole prompt"
    return None


def _through_block(stage: GPT2Stage, x_TD: torch.Tensor, chunk: int) -> torch.Tensor:
    """The stage's first block over all positions, `chunk` at a time, on a cache of its own."""
    num_blocks = -(-_POSITIONS // _BLOCK_SIZE)
    dtype = str(stage.dtype).removeprefix("torch.")
    cache = KVCache(stage.arch, stage.layout, num_blocks, _BLOCK_SIZE, dtype, stage.device)
    done = []
    for start in range(0, _POSITIONS, chunk):
        rows_TD = x_TD[start : start + chunk]
        cut = Slice(0, start, (0,) * len(rows_TD), tuple(reversed(range(num_blocks))))
        inputs = build_inputs(StepPlan(0, 0, 0, (cut,)), stage.layout, _BLOCK_SIZE, stage.device)
        done.append(stage.blocks[0](rows_TD, inputs, cache))
    return torch.cat(done)
