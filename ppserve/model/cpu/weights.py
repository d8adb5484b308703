"""Weights as the products want them: packed once, a slice of outputs at a time, while a checkpoint is loaded.

N outputs, K inputs, W words.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ppserve.errors import ConfigError
from ppserve.model.checkpoint import Matrix
from ppserve.model.cpu.huge_pages import HugePages
from ppserve.model.cpu.kernels.memory import address, aligned
from ppserve.model.cpu.kernels.operations import OPERATIONS, SMALLEST_BF16
from ppserve.model.cpu.kernels.products import Weights
from ppserve.model.cpu.kernels.tile_code import PANEL, MicroKernel

OUTPUTS_MULTIPLE = 64
"""Outputs are padded to it, so that a row of results can be packed as the next row of inputs."""

READ_BYTES = 8 << 20
"""Of a matrix as float32: the most that is in memory beside the packed weights."""

_MOST_INT8 = 127
MOST_INT8_INPUTS = (2**31 - 1) // _MOST_INT8**2
"""Of a linear layer: a sum of more products may not fit in 32 bits."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


def outputs_at_once(num_inputs: int) -> int:
    return max(PANEL, READ_BYTES // (4 * num_inputs) // PANEL * PANEL)


class PackedWeights:
    """A matrix and its bias for one micro-kernel.

    Products start from the bias in float32, so that a result is one chain of multiply-adds; for the others the
    bias is added at the end. int8 weights are symmetric, one scale for each output. Raises ConfigError where there
    are more inputs than int8 sums have room for.
    """

    def __init__(
        self,
        weight_NK: Matrix,
        bias_N: torch.Tensor | None,
        precision: str,
        kind: MicroKernel,
        memory: HugePages,
    ) -> None:
        self.num_outputs, self.num_inputs = weight_NK.shape
        if precision == "int8" and self.num_inputs > MOST_INT8_INPUTS:
            most = f"int8 takes linear layers of at most {MOST_INT8_INPUTS} inputs"
            raise ConfigError("--quantization", f"{most}; this model has one of {self.num_inputs}")
        self.kind = kind
        self._dtype = _DTYPES[precision]
        per_word = 4 // self._dtype.itemsize
        self._chunks = -(-self.num_inputs // (per_word * PANEL))
        self.num_padded_outputs = outputs = -(-self.num_outputs // OUTPUTS_MULTIPLE) * OUTPUTS_MULTIPLE
        self._panels = memory.zeros((outputs // PANEL, self._chunks * PANEL, PANEL), np.int32)
        self._bias, self._scales = aligned(outputs, np.float32), aligned(outputs, np.float32)
        self._sums_of_weights = aligned(outputs, np.int32)
        if bias_N is not None:
            self._bias[: self.num_outputs] = bias_N.float().numpy()
        at_once = outputs_at_once(self.num_inputs)
        for begin in range(0, self.num_outputs, at_once):
            self._pack(begin, weight_NK[begin : begin + at_once])
        self._start: NDArray[Any] = aligned(outputs, np.int32)
        if precision == "float32":
            self._start = self._bias
        elif raised := OPERATIONS[kind.operation].raised:
            self._start[:] = -raised * self._sums_of_weights
        self.num_bytes = self._panels.nbytes + self._bias.nbytes + self._scales.nbytes

    @property
    def seen_by_kernels(self) -> Weights:
        return Weights(
            address(self._panels),
            address(self._start),
            0 if self._start is self._bias else address(self._bias),
            address(self._scales),
            self._chunks,
            self.num_padded_outputs,
        )

    def _pack(self, begin: int, weight_nK: torch.Tensor) -> None:
        """Put some outputs, of which the first is `begin`, into their panels."""
        count = len(weight_nK)
        num_panels = -(-count // PANEL)
        per_chunk = PANEL * 4 // self._dtype.itemsize
        padded_nK = torch.zeros(num_panels * PANEL, self._chunks * per_chunk, dtype=self._dtype)
        padded_nK[:count, : self.num_inputs] = self._in_precision(weight_nK, slice(begin, begin + count))
        words_nW = padded_nK.view(torch.int32).numpy()
        first = begin // PANEL
        self._panels[first : first + num_panels] = words_nW.reshape(num_panels, PANEL, -1).transpose(0, 2, 1)

    def _in_precision(self, weight_nK: torch.Tensor, where: slice) -> torch.Tensor:
        if self._dtype == torch.float32:
            return weight_nK.float()
        if self._dtype == torch.bfloat16:
            rounded = weight_nK.to(torch.bfloat16)
            return rounded.masked_fill_(rounded.abs() < SMALLEST_BF16, 0)
        weight_nK = weight_nK.float()
        scale_n = weight_nK.abs().amax(dim=1) / _MOST_INT8
        # An output whose weights are all 0 has no scale of its own.
        steps_nK = weight_nK / scale_n.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
        quantised = steps_nK.round_().clamp_(-_MOST_INT8, _MOST_INT8).to(torch.int8)
        self._scales[where] = scale_n.numpy()
        self._sums_of_weights[where] = quantised.sum(dim=1, dtype=torch.int32).numpy()
        return quantised
