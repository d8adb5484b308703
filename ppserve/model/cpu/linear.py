"""Linear layers. Their weights are packed once, some outputs at a time, while a checkpoint is loaded.

T rows, N outputs, K inputs, W words.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from ppserve.errors import ConfigError
from ppserve.model.backend import INT4
from ppserve.model.checkpoint import Matrix
from ppserve.model.cpu.four_bits import in_four_bits, words
from ppserve.model.cpu.kernels.memory import LINE_BYTES, Arena, address, aligned
from ppserve.model.cpu.kernels.operations import OPERATIONS, SMALLEST_BF16
from ppserve.model.cpu.kernels.products import Weights
from ppserve.model.cpu.kernels.tile_code import PANEL, MicroKernel
from ppserve.model.cpu.kernels.work import LINEAR, Jobs, as_table
from ppserve.model.cpu.scratch import ScratchMemory
from ppserve.model.cpu.thread_pool import ThreadPool

OUTPUTS_MULTIPLE = 64
"""Outputs are padded to a multiple of this, so that a row of results can be packed as the next row of inputs."""

READ_BYTES = 8 << 20
"""The most bytes of a matrix, as float32, that are in memory beside the packed weights."""

_MOST_INT8 = 127
MOST_INT8_INPUTS = (2**31 - 1) // _MOST_INT8**2
"""The most inputs that a linear layer of int8 may have: a sum of more products may not fit in 32 bits."""


class PackedWeights:
    """A matrix and its bias, packed for one micro-kernel.

    A float32 product begins with the bias, so that a result is one chain of multiply-adds; in other types the bias
    is added at the end. int8 weights are symmetric, with one scale for each output; for int4 see `four_bits`.
    Raises ConfigError for more inputs than int8 sums have room for.
    """

    def __init__(
        self, weight_NK: Matrix, bias_N: torch.Tensor | None, dtype: torch.dtype, kind: MicroKernel, arena: Arena
    ) -> None:
        self.num_outputs, self.num_inputs = weight_NK.shape
        if kind.is_integer and self.num_inputs > MOST_INT8_INPUTS:
            most = f"int8 takes linear layers of at most {MOST_INT8_INPUTS} inputs"
            raise ConfigError("--quantization", f"{most}; this model has one of {self.num_inputs}")
        self._dtype, self._kind = dtype, kind
        self._chunks = -(-self.num_inputs // kind.chunk_inputs)
        self._padded_outputs = outputs = -(-self.num_outputs // OUTPUTS_MULTIPLE) * OUTPUTS_MULTIPLE
        lines = self._chunks * kind.chunk_bytes // LINE_BYTES
        self._panels = arena.zeros((outputs // PANEL, lines, PANEL), np.int32)
        self._bias, self._scales = aligned(outputs, np.float32), aligned(outputs, np.float32)
        self._sums_of_weights = aligned(outputs, np.int32)
        if bias_N is not None:
            self._bias[: self.num_outputs] = bias_N.float().numpy()
        at_once = max(PANEL, READ_BYTES // (4 * self.num_inputs) // PANEL * PANEL)
        for begin in range(0, self.num_outputs, at_once):
            own = slice(begin, min(begin + at_once, self.num_outputs))
            stored = weight_NK.four_bits(own) if dtype == INT4 else None
            if stored is None:
                self._pack(begin, weight_NK[own])
            else:
                self._keep(begin, pad(words(stored), (0, 0, 0, -(own.stop - begin) % PANEL)))
        self._start: NDArray[Any] = aligned(outputs, np.int32)
        self._start[:] = -OPERATIONS[kind.operation].raised * self._sums_of_weights
        if dtype == torch.float32:
            self._start = self._bias
        self.num_bytes = self._panels.nbytes + self._bias.nbytes + self._scales.nbytes

    @property
    def seen_by_kernels(self) -> Weights:
        """The addresses and sizes that kernels are given. They are valid as long as this object lives."""
        return Weights(
            address(self._panels),
            address(self._start),
            0 if self._start is self._bias else address(self._bias),
            address(self._scales),
            self._chunks,
            self._padded_outputs,
        )

    def _pack(self, begin: int, weight_nK: torch.Tensor) -> None:
        """Put the weights of some outputs into their panels. begin: the number of the first output."""
        num_panels = -(-len(weight_nK) // PANEL)
        padded_nK = torch.zeros(num_panels * PANEL, self._chunks * self._kind.chunk_inputs)
        padded_nK[: len(weight_nK), : self.num_inputs] = weight_nK
        self._keep(begin, self._words(padded_nK, slice(begin, begin + len(padded_nK))))

    def _keep(self, begin: int, words_nW: torch.Tensor) -> None:
        """Put the words (int32) of whole panels where they belong. begin: the number of the first output."""
        num_panels, first = len(words_nW) // PANEL, begin // PANEL
        panels = words_nW.numpy().reshape(num_panels, PANEL, -1).transpose(0, 2, 1)
        self._panels[first : first + num_panels] = panels

    def _words(self, weight_nK: torch.Tensor, outputs: slice) -> torch.Tensor:
        """Return the weights of some outputs, rounded, as int32 words. For int8, also keep each output's scale and
        the sum of its weights."""
        if self._dtype == torch.float32:
            return weight_nK.view(torch.int32)
        if self._dtype == torch.bfloat16:
            rounded_nK = weight_nK.to(torch.bfloat16)
            return rounded_nK.masked_fill_(rounded_nK.abs() < SMALLEST_BF16, 0).view(torch.int32)
        if self._dtype == INT4:
            return words(in_four_bits(weight_nK))
        scale_n = weight_nK.abs().amax(dim=1) / _MOST_INT8
        # The scale of an output whose weights are all 0 is 0, by which nothing can be divided.
        steps_nK = weight_nK / scale_n.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
        rounded_nK = steps_nK.round_().clamp_(-_MOST_INT8, _MOST_INT8).to(torch.int8)
        self._scales[outputs] = scale_n.numpy()
        self._sums_of_weights[outputs] = rounded_nK.sum(dim=1, dtype=torch.int32).numpy()
        return rounded_nK.view(torch.int32)


class PackedLinear:
    """A linear layer of float32 rows. A row's result does not depend on the other rows.

    job: LINEAR, or OUTPUT for the LM head.
    """

    def __init__(
        self, packed: PackedWeights, thread_pool: ThreadPool, scratch: ScratchMemory, job: int = LINEAR
    ) -> None:
        self.num_outputs, self.num_inputs, self.num_bytes = packed.num_outputs, packed.num_inputs, packed.num_bytes
        self.weights = packed.seen_by_kernels
        """See `PackedWeights.seen_by_kernels`."""
        self._thread_pool, self._scratch = thread_pool, scratch
        self._jobs = Jobs((job, as_table(self.weights, (self.num_inputs,))), kept=packed)
        scratch.fit(self.weights)

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        return self.result_of(self._jobs, x_TK).clone()

    def result_of(self, jobs: Jobs, x_TK: torch.Tensor) -> torch.Tensor:
        """Run jobs of which the last ends with this layer. Return its result, which is valid until the next
        job."""
        x_TK, num_rows = x_TK.contiguous(), len(x_TK)
        scratch, (y, *kept) = self._scratch.of_step(num_rows)
        step, x = as_table(scratch), x_TK.data_ptr()
        self._thread_pool.run(jobs.address, jobs.count, address(step), x, 0, scratch.y)
        del kept
        shape = num_rows, self.num_outputs
        strides = self.weights.outputs, 1
        return torch.from_numpy(y).as_strided(shape, strides)
