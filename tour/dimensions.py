"""Part 7 of the tour: the same model over four ranks in every way, and what travels between them."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ppserve import Architecture, Options, Pipeline
from tour.errors import require

# Tensor ranks, stages, replicas.
SHAPES = ((1, 1, 1), (1, 4, 1), (2, 2, 1), (4, 1, 1), (1, 2, 2))
_NUM_TOKENS = 16
_CALLERS = 8
_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Travels:
    """What one token being decoded sends from rank to rank, float32. gathers: times that its ranks wait for each
    other."""

    messages: int
    num_bytes: int
    gathers: int

    @classmethod
    def of(cls, arch: Architecture, tensor: int, stages: int) -> Travels:
        """Between stages, every tensor rank hands the whole row to its like. Within a stage, every rank gives its
        share of a row to all others: at first of the embedding; in each layer of the heads, of the attention's
        result, of the MLP's inner row and of its result; at the end of the logits."""
        of_layers = [arch.width, arch.width, arch.inner_width, arch.width] * arch.num_layers
        rows = [arch.width, *of_layers, arch.vocab_size]
        gathers = len(rows) if tensor > 1 else 0
        hops, others = (stages - 1) * tensor, tensor - 1
        numbers = hops * arch.width + others * sum(rows)
        return cls(hops + gathers * tensor * others, numbers * _FLOAT32_BYTES, gathers)


@dataclass(frozen=True, slots=True)
class ShapeRun:
    """One shape, measured. itl_ms: between the tokens of a single caller. tokens_per_s: of several at once."""

    token_ids: tuple[int, ...]
    itl_ms: float
    tokens_per_s: float


def run_shape(model: str, prompt: list[int], tensor: int, stages: int, replicas: int) -> ShapeRun:
    """Ranks are threads of this process."""
    with Pipeline(
        model, stages, tensor_parallel=tensor, replicas=replicas, dtype="float32", threads=1, force_cpu=True
    ) as pipeline:
        asked: Options = {"max_tokens": _NUM_TOKENS, "seed": 7, "ignore_eos": True}
        pipeline.complete(prompt, **asked)  # a warm-up
        began = time.monotonic()
        alone = pipeline.complete(prompt, **asked)
        alone_s = time.monotonic() - began
        began = time.monotonic()
        together = pipeline.complete_all([prompt] * _CALLERS, **asked)
        together_s = time.monotonic() - began
    ids = tuple(token.id for token in alone.sequences[0].tokens)
    others = {tuple(token.id for token in each.sequences[0].tokens) for each in together}
    require(others == {ids}, f"{tensor}x{stages}x{replicas}: tokens depend on who else is served")
    return ShapeRun(ids, 1e3 * alone_s / _NUM_TOKENS, _CALLERS * _NUM_TOKENS / together_s)
