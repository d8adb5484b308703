"""A loaded model without its backend's types: a stage tests it, gives it a cache, and has it compute steps.

Within `model`, a `Backend` has types of its own for a step's inputs and for linear layers, which are its type
parameters. A stage need not know them.
"""

from __future__ import annotations

from functools import partial
from typing import Generic

import torch

from ppserve.core.architecture import StageLayout
from ppserve.core.plan import StepPlan
from ppserve.model.backend import (
    AnyBackend,
    Backend,
    CachedModel,
    Computing,
    LoadedModel,
    OwnLinear,
    PreparedStep,
    Progress,
    Reading,
)
from ppserve.model.checkpoint import Checkpoint
from ppserve.model.decoder import Decoder, load_stage
from ppserve.model.inputs import Gather, Inputs, KVCache, build_inputs
from ppserve.model.selftest import check_determinism


def load(
    checkpoint: Checkpoint, layout: StageLayout, backend: Backend[Inputs, OwnLinear], progress: Progress
) -> LoadedModel:
    """See `AnyBackend.load`."""
    return _LoadedDecoder(load_stage(checkpoint, layout, backend, progress))


def cached(
    computing: Computing[Inputs], cache: KVCache[Inputs], layout: StageLayout, backend: AnyBackend
) -> CachedModel:
    """Return a model that computes steps with this cache."""

    def prepare(plan: StepPlan, gather: Gather) -> PreparedStep:
        inputs = build_inputs(plan, layout, cache, gather)

        def read_out(hidden_TD: torch.Tensor, with_masks: StepPlan) -> Reading:
            assert not with_masks.awaits_masks, "nothing is drawn before the masks are there"
            own = inputs if with_masks is plan else inputs.with_plan(with_masks)
            return computing.read_out(own, hidden_TD)

        return PreparedStep(partial(computing.forward, inputs), read_out)

    return CachedModel(layout, backend, prepare)


class _LoadedDecoder(Generic[Inputs, OwnLinear]):
    """A `LoadedModel` that is made of a `Decoder`."""

    def __init__(self, model: Decoder[Inputs, OwnLinear]) -> None:
        self.arch, self.layout, self.backend = model.arch, model.layout, model.backend
        self.num_params, self.weight_bytes = model.num_params, model.weight_bytes
        self._model = model

    def check_determinism(self, block_size: int) -> str | None:
        return check_determinism(self._model, block_size)

    def with_cache(self, num_blocks: int, block_size: int, *, populate: bool = False) -> CachedModel:
        return self.backend.with_cache(self._model, num_blocks, block_size, populate=populate)

    def parts(self, num_blocks: int, block_size: int) -> list[CachedModel]:
        model = self._model
        cache = self.backend.make_cache(self.arch, self.layout, num_blocks, block_size)
        # Reading memory that was never written would be too fast: the system shows one cached page of zeros for
        # it.
        cache.fill(0.01)
        models = (model.computing(*model.sublayers[:number]) for number in range(len(model.sublayers) + 1))
        return [cached(each, cache, self.layout, self.backend) for each in models]
