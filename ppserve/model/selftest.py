"""The self-test at start-up: it checks that a row's result does not depend on the other rows.

Our own kernels are made so; those of a library may not be. So this tries, with the stage's own weights, shapes,
threads and size of KV blocks:

- linear layers, with every number of rows for which a kernel works in another way (for a library's kernels, up to
  the largest step);
- one layer of each kind, with prompts whole, in chunks, beside others, and token by token;
- the LM head and the draws, with rows alone and among others.

Linear layers are also tried with weights [w, -w] and inputs [r, r]. Their true products are 0, so the results are
the rounding errors of one order of summation. With another order, nearly every number would differ.

Meanwhile every kernel is compiled (or read from its cache), so that no request has to wait for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from ppserve.core.architecture import Cut
from ppserve.core.layers import LayerSpec
from ppserve.core.plan import Draw, Drawn, Slice, StepPlan
from ppserve.core.request import SamplingParams
from ppserve.model.backend import Linear, OwnLinear, Sublayer
from ppserve.model.checkpoint import MatrixInMemory
from ppserve.model.decoder import Decoder
from ppserve.model.inputs import Inputs, KVCache, build_inputs

_ROW_COUNTS = (1, 2, 3, 5, 17, 64, 65, 128)
# The head reads at most 64 rows at a time.
_HEAD_ROW_COUNTS = (1, 2, 3, 17, 64)
# The most outputs of a layer [w, -w], which is packed for this check alone.
_MOST_PROBE_OUTPUTS = 4096

# Rows of the sequences. The first is so long that threads share it. One more is added where a step has room for
# it.
_LENGTHS = (130, 41, 7)


class _PromptSlice(NamedTuple):
    """A slice of a step: consecutive rows of one of the sequences, by its number."""

    sequence: int
    start: int
    num_rows: int


def _in_chunks(sequence: int, chunk: int) -> list[list[_PromptSlice]]:
    length = _LENGTHS[sequence]
    return [[_PromptSlice(sequence, start, min(chunk, length - start))] for start in range(0, length, chunk)]


def _ways(whole: Sequence[_PromptSlice]) -> dict[str, list[list[_PromptSlice]]]:
    """Return ways to compute prompts in steps. Each must give the same rows as each prompt whole and alone."""
    return {
        "token by token": _in_chunks(1, 1),
        "in chunks of 7": _in_chunks(0, 7),
        "in chunks of 64": _in_chunks(0, 64),
        "in one step with others": [list(whole)],
        "ending in a step of decodes": [
            [_PromptSlice(each.sequence, 0, each.num_rows - 1) for each in whole],
            [_PromptSlice(each.sequence, each.num_rows - 1, 1) for each in whole],
        ],
    }


@torch.inference_mode()
def check_determinism(stage: Decoder[Inputs, OwnLinear], block_size: int = 16) -> str | None:
    """Return None if no row's result depends on other rows; else the first check that failed, in words.

    It does not wait for other tensor ranks. It takes a second or two; the first time it also compiles kernels.
    block_size: positions of a KV block.
    """
    generator = torch.Generator().manual_seed(0)
    if stage.head is not None:
        if reason := _check_reading(stage, generator):
            return reason
        row_counts = _HEAD_ROW_COUNTS + stage.backend.more_head_rows
        if reason := _check_linear(stage, stage.head.linear, row_counts, generator):
            return f"the LM head: {reason}"
        hidden_TD = _hidden(stage, row_counts[-1], generator)
        if reason := _compare_rows(stage.head.logits, hidden_TD, row_counts):
            return f"logits of hidden states: {reason}"
    by_shape = {(each.num_inputs, each.num_outputs): each for each in stage.linears.values()}
    for linear in by_shape.values():
        if reason := _check_linear(stage, linear, _ROW_COUNTS + stage.backend.more_rows, generator):
            return f"a linear layer of {linear.num_inputs} inputs: {reason}"
    for layer in layers_of_each_kind(stage):
        if reason := _check_layer(stage, layer, block_size, generator):
            return reason
    return None


def layers_of_each_kind(stage: Decoder[Inputs, OwnLinear]) -> list[list[Sublayer[Inputs]]]:
    """Return the residual lines of the stage's first layer of each kind. Layers with equal specifications compute
    in the same way, so one of them is enough."""
    kinds: dict[LayerSpec, dict[bool, Sublayer[Inputs]]] = {}
    for number, sublayer in zip(stage.layout.sublayers, stage.sublayers, strict=True):
        # Where a stage begins within a layer, the first line of a kind may be an MLP.
        kinds.setdefault(stage.arch.layers[number // 2], {}).setdefault(number % 2 == 1, sublayer)
    return [list(halves.values()) for halves in kinds.values()]


def _check_reading(stage: Decoder[Inputs, OwnLinear], generator: torch.Generator) -> str | None:
    # Equal logits give equal tokens, alone and among others.
    vocab_size = stage.arch.vocab_size
    params = SamplingParams(top_k=50, top_p=0.9), SamplingParams(), SamplingParams(temperature=0)
    count = max((len(params), *stage.backend.more_head_rows))
    logits_RV = torch.randn(count, vocab_size, generator=generator).to(stage.backend.device)
    slices = [Slice(i, 0, (0,), (0,), Draw(params[i % 3], num_logprobs=1)) for i in range(count)]
    cache = _cache(stage, 1, block_size=16)

    def read(rows: slice) -> tuple[Drawn, ...]:
        inputs = build_inputs(StepPlan(0, 0, 0, tuple(slices[rows])), stage.layout, cache)
        return stage.backend.read_logits(inputs, iter([logits_RV[rows]]), Cut((vocab_size,), 0))()[0]

    alone = [read(slice(row, row + 1))[0] for row in range(len(params))]
    if list(read(slice(count))[: len(params)]) != alone:
        return f"tokens or log-probabilities of the same logits differ between 1 and {count} rows at once"
    return None


def _check_linear(
    stage: Decoder[Inputs, OwnLinear], linear: Linear, row_counts: tuple[int, ...], generator: torch.Generator
) -> str | None:
    """Check that rows are the same with more rows after or before them. Return None, or what differs."""
    x_TK = torch.randn(row_counts[-1], linear.num_inputs, generator=generator)
    half = linear.num_inputs // 2
    weight_NH = torch.randn(min(linear.num_outputs, _MOST_PROBE_OUTPUTS), half, generator=generator)
    last_N1 = torch.zeros(len(weight_NH), linear.num_inputs % 2)
    weight_NK = torch.cat([weight_NH, -weight_NH, last_N1], dim=1)
    trial = stage.backend.linear(MatrixInMemory(weight_NK), None, for_selftest=True)
    half_TK, last_T1 = x_TK[:, :half], x_TK[:, 2 * half :]
    x_of_trial_TK = torch.cat([half_TK, half_TK, last_T1], dim=1)
    device, dtype = stage.backend.device, stage.backend.precision.compute
    return _compare_rows(linear, x_TK.to(device, dtype), row_counts) or _compare_rows(
        trial, x_of_trial_TK.to(device, dtype), row_counts
    )


def _compare_rows(
    compute: Callable[[torch.Tensor], torch.Tensor], rows_T: torch.Tensor, row_counts: tuple[int, ...]
) -> str | None:
    """Check that the first and the last rows are the same when fewer are computed at once. Return None, or what
    differs. rows_T: as many as the last of `row_counts`."""
    y_TN = compute(rows_T).clone()
    for count in row_counts[:-1]:
        if not torch.equal(compute(rows_T[:count]), y_TN[:count]):
            return f"rows differ between {count} and {row_counts[-1]} rows at once"
        if not torch.equal(compute(rows_T[-count:]), y_TN[-count:]):
            return f"the last rows differ between {count} and {row_counts[-1]} rows at once"
    return None


def _hidden(stage: Decoder[Inputs, OwnLinear], num_rows: int, generator: torch.Generator) -> torch.Tensor:
    hidden_TD = torch.randn(num_rows, stage.arch.width, generator=generator)
    return hidden_TD.to(stage.backend.device, stage.backend.precision.hidden)


def _check_layer(
    stage: Decoder[Inputs, OwnLinear],
    sublayers: Sequence[Sublayer[Inputs]],
    block_size: int,
    generator: torch.Generator,
) -> str | None:
    """Check that prompts have the same hidden states in any chunks and beside others. Return None, or what
    differs."""
    most = max(stage.backend.more_rows, default=0)
    lengths = (*_LENGTHS, most - sum(_LENGTHS)) if most > sum(_LENGTHS) else _LENGTHS
    prompts_TD = [_hidden(stage, length, generator) for length in lengths]
    through_layer = partial(_through_layer, stage, sublayers, block_size, prompts_TD)
    whole = [_PromptSlice(number, 0, length) for number, length in enumerate(lengths)]
    alone_TD = [through_layer([[part]])[part.sequence] for part in whole]
    for way, steps in _ways(whole).items():
        for number, rows_TD in through_layer(steps).items():
            if not torch.equal(rows_TD, alone_TD[number]):
                return f"hidden states of a prompt {way} differ from the same prompt at once and alone"
    return None


def _through_layer(
    stage: Decoder[Inputs, OwnLinear],
    sublayers: Sequence[Sublayer[Inputs]],
    block_size: int,
    prompts_TD: Sequence[torch.Tensor],
    steps: Iterable[Sequence[_PromptSlice]],
) -> dict[int, torch.Tensor]:
    """Compute these sublayers with a cache of their own. Return the rows of each sequence, by its number."""
    tables, num_blocks = [], 0
    for prompt_TD in prompts_TD:
        needed = -(-len(prompt_TD) // block_size)
        tables.append(tuple(reversed(range(num_blocks, num_blocks + needed))))
        num_blocks += needed
    cache = _cache(stage, num_blocks, block_size)
    done: dict[int, list[torch.Tensor]] = {}
    for parts in steps:
        rows_TD = torch.cat([prompts_TD[of.sequence][of.start : of.start + of.num_rows] for of in parts])
        slices = tuple(Slice(of.sequence, of.start, (0,) * of.num_rows, tables[of.sequence]) for of in parts)
        inputs = build_inputs(StepPlan(0, 0, 0, slices), stage.layout, cache)
        for sublayer in sublayers:
            rows_TD = sublayer(rows_TD, inputs)
        each_TD = torch.split(rows_TD, [of.num_rows for of in parts])
        for of, part_TD in zip(parts, each_TD, strict=True):
            done.setdefault(of.sequence, []).append(part_TD)
    return {number: torch.cat(parts_TD) for number, parts_TD in done.items()}


def _cache(stage: Decoder[Inputs, OwnLinear], num_blocks: int, block_size: int) -> KVCache[Inputs]:
    return stage.backend.make_cache(stage.arch, stage.layout, num_blocks, block_size)
