"""A stage's weights, from a checkpoint into the form in which a backend keeps them.

V vocabulary, D width, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ppserve.core.architecture import StageLayout, stage_params
from ppserve.model.backend import Backend, LayerNorm, Linear
from ppserve.model.checkpoint import WHOLE, Checkpoint, TensorPart, tensor_shapes

Progress = Callable[[int, int], None]
"""Called with the bytes read so far and in all."""


class StoredMatrix:
    """A `Matrix` of these outputs; each slice of it is read when it is asked for.

    read: as `Checkpoint.tensor`.
    """

    def __init__(
        self,
        read: Callable[[str, TensorPart], torch.Tensor],
        name: str,
        outputs: tuple[slice, ...],
        num_inputs: int,
    ) -> None:
        self._read, self._name, self._outputs = read, name, outputs
        self.shape = sum(own.stop - own.start for own in outputs), num_inputs

    def __getitem__(self, wanted: slice, /) -> torch.Tensor:
        begin, end, _ = wanted.indices(self.shape[0])
        rows, at = [], 0
        for own in self._outputs:
            first, last = max(own.start, own.start + begin - at), min(own.stop, own.start + end - at)
            if first < last:
                rows.append(slice(first, last))
            at += own.stop - own.start
        return self._read(self._name, TensorPart(tuple(rows)))


class WeightReader:
    """Takes tensors one at a time, by their canonical names, and counts what it took.

    Of a matrix it takes the outputs that are asked for: those of a tensor rank. num_params: numbers read.
    weight_bytes: what they occupy in the form in which they are kept. linears: by name.
    """

    def __init__(self, checkpoint: Checkpoint, layout: StageLayout, backend: Backend, progress: Progress) -> None:
        self.arch, self.layout = checkpoint.architecture, layout
        self.backend = backend
        self.num_params = self.weight_bytes = 0
        self.linears: dict[str, Linear] = {}
        self._checkpoint = checkpoint
        self._progress = progress
        self._done_bytes = 0
        stored: torch.dtype = getattr(torch, checkpoint.stored_dtype)
        self._total_bytes = stage_params(self.arch, layout) * stored.itemsize

    def embedding(self, name: str, columns: slice) -> torch.Tensor:
        """These columns of an embedding."""
        return self._stored(name, TensorPart(columns=columns))

    def norm(self, name: str) -> LayerNorm:
        weight_D = self._stored(f"{name}.weight")
        bias_D = self._stored(f"{name}.bias") if self.arch.biases else None
        return LayerNorm(weight_D, bias_D, self.arch.layer_norm_epsilon)

    def linear(self, name: str, *outputs: slice) -> Linear:
        bias_N = self._stored(f"{name}.bias", TensorPart(outputs)) if self.arch.biases else None
        self.linears[name] = linear = self._linear(f"{name}.weight", outputs, bias_N)
        return linear

    def lm_head(self, outputs: slice) -> Linear:
        return self._linear("lm_head.weight", (outputs,), None)

    def _linear(self, name: str, outputs: tuple[slice, ...], bias_N: torch.Tensor | None) -> Linear:
        _, num_inputs = tensor_shapes(self.arch)[name]
        linear = self.backend.linear(StoredMatrix(self._tensor, name, outputs, num_inputs), bias_N)
        self.weight_bytes += linear.num_bytes
        return linear

    def _stored(self, name: str, part: TensorPart = WHOLE) -> torch.Tensor:
        """A tensor as the backend stores it."""
        tensor = self.backend.stored(self._tensor(name, part))
        self.weight_bytes += tensor.nbytes
        return tensor

    def _tensor(self, name: str, part: TensorPart) -> torch.Tensor:
        tensor = self._checkpoint.tensor(name, part)
        self.num_params += tensor.numel()
        self._done_bytes += tensor.nbytes
        self._progress(self._done_bytes, max(self._done_bytes, self._total_bytes))
        return tensor
