"""A stage's weights, from a checkpoint into the form in which a backend keeps them.

V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ppserve.core.architecture import StageLayout, stage_params
from ppserve.model.backend import Backend, Linear, Operator
from ppserve.model.checkpoint import Checkpoint

Progress = Callable[[int, int], None]
"""Called with the bytes read so far and in all."""


class WeightReader:
    """Takes tensors one at a time, by their canonical names, and counts what it took.

    num_params: numbers read. weight_bytes: what they occupy in the form in which they are kept.
    """

    def __init__(
        self, checkpoint: Checkpoint, layout: StageLayout, backend: Backend, progress: Progress
    ) -> None:
        self.arch = checkpoint.architecture
        self.backend = backend
        self.num_params = self.weight_bytes = 0
        self._checkpoint = checkpoint
        self._progress = progress
        self._done_bytes = 0
        stored: torch.dtype = getattr(torch, checkpoint.stored_dtype)
        self._total_bytes = stage_params(self.arch, layout) * stored.itemsize

    def stored(self, name: str) -> torch.Tensor:
        """A tensor as the backend stores it."""
        tensor = self.backend.stored(self._tensor(name))
        self.weight_bytes += tensor.nbytes
        return tensor

    def norm(self, name: str) -> Operator:
        weight_D = self.stored(f"{name}.weight")
        return self.backend.norm(weight_D, self._bias(name), self.arch.layer_norm_epsilon)

    def linear(self, name: str) -> Linear:
        bias_N = self._bias(name)
        return self._linear(self._tensor(f"{name}.weight"), bias_N)

    def lm_head(self) -> Linear:
        """Without the rows of the padded vocabulary: their ids can never be drawn."""
        return self._linear(self._tensor("lm_head.weight")[: self.arch.vocab_size], None)

    def _linear(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> Linear:
        linear = self.backend.linear(weight_NK, bias_N)
        self.weight_bytes += linear.num_bytes
        return linear

    def _bias(self, name: str) -> torch.Tensor | None:
        return self.stored(f"{name}.bias") if self.arch.biases else None

    def _tensor(self, name: str) -> torch.Tensor:
        tensor = self._checkpoint.tensor(name)
        self.num_params += tensor.numel()
        self._done_bytes += tensor.nbytes
        self._progress(self._done_bytes, max(self._done_bytes, self._total_bytes))
        return tensor
