"""Reads a stage's weights from a checkpoint, in the form in which a backend keeps them.

V vocabulary, D width, N outputs.
"""

from __future__ import annotations

from typing import Generic

import torch

from ppserve.core.architecture import StageLayout, stage_params
from ppserve.core.layers import NormSpec
from ppserve.model.backend import Backend, NormWeights, OwnLinear, Progress
from ppserve.model.checkpoint import WHOLE, Checkpoint, FourBits, TensorPart
from ppserve.model.checkpoint.families import tensor_shapes
from ppserve.model.inputs import Inputs

Outputs = tuple[str, slice]
"""The canonical name of a linear layer, without `.weight`, and some of its outputs."""

_EMBEDDING_ROWS = 1024
"""How many rows of an embedding are read at once."""


class StoredMatrix:
    """A `Matrix` of outputs that are read from a checkpoint. A slice is read when it is asked for."""

    def __init__(self, read: TensorReader, outputs: tuple[Outputs, ...], num_inputs: int) -> None:
        self._read, self._outputs = read, outputs
        self.shape = sum(own.stop - own.start for _, own in outputs), num_inputs

    def __getitem__(self, wanted: slice, /) -> torch.Tensor:
        rows = self._rows(wanted)
        parts = [self._read.tensor(f"{name}.weight", TensorPart(tuple(own))) for name, own in rows.items()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def four_bits(self, wanted: slice) -> FourBits | None:
        rows = self._rows(wanted)
        parts = [self._read.four_bits(f"{name}.weight", tuple(own)) for name, own in rows.items()]
        found = [part for part in parts if part is not None]
        return FourBits(*map(torch.cat, zip(*found, strict=True))) if len(found) == len(parts) else None

    def _rows(self, wanted: slice) -> dict[str, list[slice]]:
        begin, end, _ = wanted.indices(self.shape[0])
        rows: dict[str, list[slice]] = {}
        at = 0
        for name, own in self._outputs:
            first = max(own.start, own.start + begin - at)
            last = min(own.stop, own.start + end - at)
            if first < last:
                rows.setdefault(name, []).append(slice(first, last))
            at += own.stop - own.start
        return rows


class TensorReader:
    """Reads parts of tensors one at a time, by their canonical names. num_params: how many numbers have been
    read."""

    def __init__(self, checkpoint: Checkpoint, layout: StageLayout, progress: Progress) -> None:
        self.arch, self.layout = checkpoint.architecture, layout
        self.num_params = 0
        self._checkpoint = checkpoint
        self._progress = progress
        self._itemsize: int = getattr(torch, checkpoint.stored_dtype).itemsize

    def tensor(self, name: str, part: TensorPart) -> torch.Tensor:
        tensor = self._checkpoint.tensor(name, part)
        self._count(tensor.numel())
        return tensor

    def four_bits(self, name: str, rows: tuple[slice, ...]) -> FourBits | None:
        found = self._checkpoint.four_bits(name, rows)
        self._count(0 if found is None else found.numbers_nGi.numel())
        return found

    def _count(self, num_params: int) -> None:
        self.num_params += num_params
        total = stage_params(self.arch, self.layout)
        self._progress(self.num_params * self._itemsize, total * self._itemsize)


class WeightReader(TensorReader, Generic[Inputs, OwnLinear]):
    """Reads tensors into the form in which a backend keeps them.

    weight_bytes: the size of what is kept. linears: the linear layers, by the first of their names.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: StageLayout,
        backend: Backend[Inputs, OwnLinear],
        progress: Progress,
    ) -> None:
        super().__init__(checkpoint, layout, progress)
        self.backend = backend
        self.weight_bytes = 0
        self.linears: dict[str, OwnLinear] = {}
        self._shapes = tensor_shapes(self.arch)

    def embedding(self, name: str, columns: slice) -> torch.Tensor:
        """Read columns of an embedding. It is the largest tensor, so it is read some rows at a time."""
        num_rows, _ = self._shapes[name]
        dtype = self.backend.precision.hidden
        device = self.backend.device
        kept_Vd = torch.empty(num_rows, columns.stop - columns.start, dtype=dtype, device=device)
        for begin in range(0, num_rows, _EMBEDDING_ROWS):
            rows = slice(begin, min(begin + _EMBEDDING_ROWS, num_rows))
            kept_Vd[rows] = self.tensor(name, TensorPart((rows,), columns))
        self.weight_bytes += kept_Vd.nbytes
        return kept_Vd

    def has(self, name: str) -> bool:
        """Return whether the model has this linear layer or norm."""
        return f"{name}.weight" in self._shapes

    def norm(self, name: str, spec: NormSpec | None) -> NormWeights | None:
        """Read a norm. Return None if there is no specification, because the layer has no such norm."""
        if spec is None:
            return None
        weight_D = self._stored(f"{name}.weight")
        bias_D = self._stored(f"{name}.bias") if spec.has_bias else None
        return NormWeights(weight_D, bias_D, spec.epsilon, spec.is_rms)

    def linear(self, *outputs: Outputs) -> OwnLinear:
        """Read outputs of one linear layer, or of several that have the same inputs, and join them in this
        order."""
        name = outputs[0][0]
        biases = [
            self._stored(f"{name}.bias", TensorPart((own,)))
            for name, own in outputs
            if f"{name}.bias" in self._shapes
        ]
        bias_N = torch.cat(biases) if biases else None
        self.linears[name] = linear = self._counted(self.backend.linear(self._matrix(*outputs), bias_N))
        return linear

    def lm_head(self, outputs: slice) -> OwnLinear:
        return self._counted(self.backend.lm_head(self._matrix(("lm_head", outputs))))

    def _matrix(self, *outputs: Outputs) -> StoredMatrix:
        _, num_inputs = self._shapes[f"{outputs[0][0]}.weight"]
        return StoredMatrix(self, outputs, num_inputs)

    def _counted(self, linear: OwnLinear) -> OwnLinear:
        self.weight_bytes += linear.num_bytes
        return linear

    def _stored(self, name: str, part: TensorPart = WHOLE) -> torch.Tensor:
        tensor = self.backend.stored(self.tensor(name, part))
        self.weight_bytes += tensor.nbytes
        return tensor
