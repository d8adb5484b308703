"""A CPU stage's sublayers and LM head, made of the kernels' jobs (`kernels.work`).

T rows, D width, d a rank's own of it, K inputs of the second product, k a rank's own of them, R rows read out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ppserve.model.backend import (
    AttentionWeights,
    Head,
    MLPWeights,
    NormWeights,
    Operator,
    ResidualWeights,
)
from ppserve.model.cpu.kernels.memory import LINE_BYTES, address, aligned
from ppserve.model.cpu.kernels.rows import EXACT_GELU, GATE, RELU, TANH, Activation, Norm
from ppserve.model.cpu.kernels.work import EXPAND, HEADS, NORM, PROJECT, READ, Jobs, as_table
from ppserve.model.cpu.kv_cache import CpuInputs
from ppserve.model.cpu.linear import PackedLinear
from ppserve.model.cpu.scratch import ScratchMemory
from ppserve.model.cpu.thread_pool import ThreadPool

_Of = AttentionWeights[PackedLinear] | MLPWeights[PackedLinear]
_Lines = Sequence[ResidualWeights[PackedLinear]]

_ROOT = 2 * math.sqrt(2 / math.pi)

ACTIVATIONS = {
    "gelu_new": Activation(GATE, np.float32(_ROOT), np.float32(0.044715 * _ROOT)),
    "quick_gelu": Activation(GATE, np.float32(1.702), np.float32(0)),
    "silu": Activation(GATE, np.float32(1), np.float32(0)),
    "tanh": Activation(TANH, np.float32(0), np.float32(0)),
    "relu": Activation(RELU, np.float32(0), np.float32(0)),
    "gelu": Activation(EXACT_GELU, np.float32(0), np.float32(0)),
}
"""The activations of `stock.ACTIVATIONS`, by the same names. torch computes the last elements of a tensor with
other code, which may differ in the last bit. These compute every element alike."""


_NORMED = Norm(0, 0, 0, np.float32(0), 0)
"""It stands in the place of a norm where the rows of a job are normed already."""
NO_WINDOW = 1 << 40
"""The window of a layer without one: more positions than any row sees."""


class PlainSublayer:
    """An attention or an MLP of normed rows, in float32. One job computes the inputs of its second product; then
    comes that product. After each of the two, tensor ranks gather."""

    def __init__(self, of: _Of, thread_pool: ThreadPool, norm: NormWeights | None = None) -> None:
        self._second = of.proj if isinstance(of, AttentionWeights) else of.contract
        self._inner = of.heads if isinstance(of, AttentionWeights) else of.inner
        self._columns, self.thread_pool = of.columns, thread_pool
        self.job, kept = _first_job(of, norm)
        self.kept: tuple[object, ...] = kept, self._second
        self._first = Jobs(self.job, kept=self.kept)

    def __call__(self, x_TD: torch.Tensor, inputs: CpuInputs) -> torch.Tensor:
        own_Td = self._second(self._inner_rows(x_TD.contiguous(), inputs, inputs.step))
        return inputs.gather.all(own_Td, self._columns)

    def _inner_rows(self, x_TD: torch.Tensor, inputs: CpuInputs, step: int) -> torch.Tensor:
        """Return the inputs of the second product, gathered from all ranks. step: the address of the table of a
        step with as many rows."""
        own_Tk = torch.empty(len(x_TD), self._inner.width)
        self.thread_pool.run(self._first.address, 1, step, x_TD.data_ptr(), own_Tk.data_ptr(), 0)
        return inputs.gather.all(own_Tk, self._inner)


class PlainMLP(PlainSublayer):
    """An MLP of any rows: those of a whole step, or some of them."""

    def __init__(self, of: MLPWeights[PackedLinear], thread_pool: ThreadPool, scratch: ScratchMemory) -> None:
        super().__init__(of, thread_pool)
        self._scratch = scratch

    def _inner_rows(self, x_TD: torch.Tensor, inputs: CpuInputs, step: int) -> torch.Tensor:
        if len(x_TD) == inputs.num_rows:
            return super()._inner_rows(x_TD, inputs, step)
        scratch, arrays = self._scratch.of_step(len(x_TD))
        own = as_table(scratch)
        inner_TK = super()._inner_rows(x_TD, inputs, address(own))
        del arrays
        return inner_TK


class CpuSublayer(PlainSublayer):
    """A residual line as two jobs. The first includes the norm; the second adds its result to the hidden
    states."""

    def __init__(self, of: _Of, norm: NormWeights | None, thread_pool: ThreadPool) -> None:
        super().__init__(of, thread_pool, norm)
        shape = self._inner.size, of.columns.size, of.columns.own.start, of.columns.width
        projection = PROJECT, as_table(self._second.weights, shape)
        self.jobs = self.job, projection
        self.has_others = len(of.columns.widths) > 1
        """Whether the stage has other tensor ranks."""
        self._projection = Jobs(projection, kept=self.kept)

    def __call__(self, x_TD: torch.Tensor, inputs: CpuInputs) -> torch.Tensor:
        x_TD = x_TD.contiguous()
        inner_TK = self._inner_rows(x_TD, inputs, inputs.step)
        own_Td = torch.empty(len(x_TD), self._columns.width, dtype=x_TD.dtype)
        run, x, out = self.thread_pool.run, x_TD.data_ptr(), own_Td.data_ptr()
        run(self._projection.address, 1, inputs.step, x, inner_TK.data_ptr(), out)
        return inputs.gather.all(own_Td, self._columns)


class LoneSublayers:
    """The residual lines of a rank that computes its stage alone, in one call of the kernels. On few rows, a call
    from Python for each of them would take a tenth of a step."""

    def __init__(self, sublayers: Sequence[CpuSublayer]) -> None:
        self._jobs = Jobs(
            *(job for each in sublayers for job in each.jobs), kept=[each.kept for each in sublayers]
        )
        self._run = sublayers[0].thread_pool.run

    def __call__(self, x_TD: torch.Tensor, inputs: CpuInputs) -> torch.Tensor:
        x_TD = x_TD.contiguous()
        out_TD = torch.empty_like(x_TD)
        self._run(self._jobs.address, self._jobs.count, inputs.step, x_TD.data_ptr(), 0, out_TD.data_ptr())
        return out_TD


class SharedSublayers:
    """The residual lines of a rank that gathers rows with the other ranks of its stage after each product."""

    def __init__(self, sublayers: Sequence[CpuSublayer]) -> None:
        self._sublayers = sublayers

    def __call__(self, x_TD: torch.Tensor, inputs: CpuInputs) -> torch.Tensor:
        for compute in self._sublayers:
            x_TD = compute(x_TD, inputs)
        return x_TD


def fuse(lines: _Lines, thread_pool: ThreadPool) -> LoneSublayers | SharedSublayers | None:
    """Return one call for several residual lines, whose norms and sums are parts of the sublayers' jobs. Return
    None if no job computes one of the lines: it has no norm before its sublayer, a norm after it or a multiplier,
    or its sublayer is neither an attention nor an MLP."""
    sublayers = []
    for line in lines:
        is_plain = line.pre_norm is not None and line.post_norm is None and line.multiplier == 1
        if not is_plain or not isinstance(line.of, AttentionWeights | MLPWeights):
            return None
        sublayers.append(CpuSublayer(line.of, line.pre_norm, thread_pool))
    return SharedSublayers(sublayers) if sublayers[0].has_others else LoneSublayers(sublayers)


def norm_operator(weights: NormWeights, thread_pool: ThreadPool, scratch: ScratchMemory) -> Operator:
    """Return a norm by itself. It takes hidden states as they are stored, or float32 rows."""
    norm, kept = _norm(weights)
    of_hidden, of_results = (Jobs((NORM, as_table(norm, (is_single,))), kept=kept) for is_single in (0, 1))
    stored = weights.weight_D.dtype

    def compute(x_TD: torch.Tensor) -> torch.Tensor:
        jobs = of_hidden if x_TD.dtype == stored else of_results
        x_TD, out_TD = x_TD.contiguous(), torch.empty(x_TD.shape)
        table, arrays = scratch.of_step(len(x_TD))
        step = as_table(table)
        thread_pool.run(jobs.address, jobs.count, address(step), x_TD.data_ptr(), 0, out_TD.data_ptr())
        del arrays
        return out_TD

    return compute


def _first_job(of: _Of, norm: NormWeights | None) -> tuple[tuple[int, NDArray[np.int64]], tuple[object, ...]]:
    """Return the job that computes the inputs of the second product, and the objects whose addresses its table
    has. norm: None: the rows are normed already, and float32."""
    if isinstance(of, AttentionWeights):
        packed = of.qkv
        head_norms = [_norm(weights) for weights in of.head_norms or ()]
        window = NO_WINDOW if of.spec.window is None else of.spec.window
        rotary = of.rotary is not None, of.rotary or 0
        layer = of.number, np.float32(of.spec.scale), len(head_norms), window, *rotary
        more = layer, *(norm for norm, _ in head_norms)
    else:
        packed, head_norms = of.expand, []
        more = ACTIVATIONS[of.spec.activation], (of.inner.width, of.spec.is_gated)
    before, kept = (_NORMED._replace(width=packed.num_inputs), ()) if norm is None else _norm(norm)
    kind = HEADS if isinstance(of, AttentionWeights) else EXPAND
    return (kind, as_table(before, packed.weights, *more)), (packed, kept, head_norms)


def lm_head(weights: NormWeights, linear: PackedLinear) -> Head:
    """Return the final norm and the LM head's product as one job."""
    norm, kept = _norm(weights)
    jobs = Jobs((READ, as_table(norm, linear.weights)), kept=kept)
    return lambda hidden_RD: linear.result_of(jobs, hidden_RD)


def _norm(weights: NormWeights) -> tuple[Norm, tuple[NDArray[np.float32], ...]]:
    """Return a norm as kernels see it, and the arrays whose addresses it has."""
    width = len(weights.weight_D)
    padded = -(-width * 4 // LINE_BYTES) * LINE_BYTES // 4
    weight, bias = aligned(padded, np.float32), aligned(padded, np.float32)
    weight[:width] = weights.weight_D.float().numpy()
    if weights.bias_D is not None:
        bias[:width] = weights.bias_D.float().numpy()
    norm = Norm(address(weight), address(bias), width, np.float32(weights.epsilon), int(weights.is_rms))
    return norm, (weight, bias)
