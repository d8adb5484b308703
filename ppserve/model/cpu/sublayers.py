"""Attention, MLP and LM head: norm, products, activation and residual in one call of the kernels.

T rows, D width, d a rank's own of it, K inputs of the second product, k a rank's own of them, R rows read out.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from ppserve.core.architecture import Cut
from ppserve.model.backend import AttentionWeights, Head, Linear, MLPWeights, NormWeights
from ppserve.model.cpu.kernels.memory import LINE_BYTES, address, aligned
from ppserve.model.cpu.kernels.rows import EXACT_GELU, GATE, RELU, TANH, Activation, Norm
from ppserve.model.cpu.kernels.work import EXPAND, HEADS, PROJECT, READ, Jobs, as_table
from ppserve.model.cpu.kv_cache import CpuInputs
from ppserve.model.cpu.linear import PackedLinear
from ppserve.model.cpu.thread_pool import ThreadPool
from ppserve.model.inputs import StepInputs

_ROOT = 2 * math.sqrt(2 / math.pi)

ACTIVATIONS = {
    "gelu_new": Activation(GATE, np.float32(_ROOT), np.float32(0.044715 * _ROOT)),
    "quick_gelu": Activation(GATE, np.float32(1.702), np.float32(0)),
    "silu": Activation(GATE, np.float32(1), np.float32(0)),
    "tanh": Activation(TANH, np.float32(0), np.float32(0)),
    "relu": Activation(RELU, np.float32(0), np.float32(0)),
    "gelu": Activation(EXACT_GELU, np.float32(0), np.float32(0)),
}
"""The activations of `stock.ACTIVATIONS`. torch's own treat a tensor's end with code that differs in the last bit.
These treat every element alike."""


class CpuSublayer:
    """A `Sublayer` as two jobs of the kernels: up to the inputs of its second product, then that product and the
    residual. One call where a rank computes the stage alone; tensor ranks gather behind each."""

    def __init__(
        self,
        first: tuple[int, NDArray[np.int64]],
        second: PackedLinear,
        inner: Cut,
        columns: Cut,
        kept: tuple[object, ...],
        thread_pool: ThreadPool,
    ) -> None:
        """first: the first job, and its table. second, inner, columns: the second product, and how tensor ranks
        share its inputs and the results. kept: what the table has the addresses of."""
        shape = inner.size, columns.size, columns.own.start, columns.width
        projection = PROJECT, as_table(second.weights, shape)
        self.jobs, self.kept, self.thread_pool = (first, projection), (kept, second), thread_pool
        self._first, self._second = (Jobs(job, kept=self.kept) for job in self.jobs)
        self._inner, self._columns = inner, columns
        self._alone = LoneSublayers([self]) if len(columns.widths) == 1 else None

    def __call__(self, x_TD: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        if self._alone is not None:
            return self._alone(x_TD, inputs)
        assert isinstance(inputs, CpuInputs), "inputs are built for the cache of this backend"
        x_TD = x_TD.contiguous()
        x, step, run = x_TD.data_ptr(), inputs.step, self.thread_pool.run
        own_Tk = torch.empty(len(x_TD), self._inner.width)
        run(self._first.address, 1, step, x, own_Tk.data_ptr(), 0)
        inner_TK = inputs.gather.all(own_Tk, self._inner)
        own_Td = torch.empty(len(x_TD), self._columns.width, dtype=x_TD.dtype)
        run(self._second.address, 1, step, x, inner_TK.data_ptr(), own_Td.data_ptr())
        return inputs.gather.all(own_Td, self._columns)


class LoneSublayers:
    """Sublayers of a rank that computes its stage alone, in one call of the kernels."""

    def __init__(self, sublayers: list[CpuSublayer]) -> None:
        self._jobs = Jobs(
            *(job for each in sublayers for job in each.jobs), kept=[each.kept for each in sublayers]
        )
        self._run = sublayers[0].thread_pool.run

    def __call__(self, x_TD: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        assert isinstance(inputs, CpuInputs), "inputs are built for the cache of this backend"
        x_TD = x_TD.contiguous()
        out_TD = torch.empty_like(x_TD)
        self._run(self._jobs.address, self._jobs.count, inputs.step, x_TD.data_ptr(), 0, out_TD.data_ptr())
        return out_TD


def attention_sublayer(of: AttentionWeights, thread_pool: ThreadPool) -> CpuSublayer:
    qkv, proj = _packed(of.qkv), _packed(of.proj)
    norm, kept = _norm(of.norm)
    head_norms = [_norm(weights) for weights in of.head_norms or ()]
    layer = of.number, np.float32(of.scale), len(head_norms)
    table = as_table(norm, qkv.weights, layer, *(norm for norm, _ in head_norms))
    return CpuSublayer((HEADS, table), proj, of.heads, of.columns, (qkv, kept, head_norms), thread_pool)


def mlp_sublayer(of: MLPWeights, thread_pool: ThreadPool) -> CpuSublayer:
    expand, contract = _packed(of.expand), _packed(of.contract)
    norm, kept = _norm(of.norm)
    table = as_table(norm, expand.weights, ACTIVATIONS[of.activation], (of.inner.width, of.is_gated))
    return CpuSublayer((EXPAND, table), contract, of.inner, of.columns, (expand, kept), thread_pool)


def lm_head(weights: NormWeights, linear: Linear) -> Head:
    packed = _packed(linear)
    norm, kept = _norm(weights)
    jobs = Jobs((READ, as_table(norm, packed.weights)), kept=kept)
    return lambda hidden_RD: packed.result_of(jobs, hidden_RD)


def _packed(linear: Linear) -> PackedLinear:
    assert isinstance(linear, PackedLinear), "a linear layer of this backend"
    return linear


def _norm(weights: NormWeights) -> tuple[Norm, tuple[NDArray[np.float32], ...]]:
    """A norm as kernels see it, and what it has the addresses of."""
    width = len(weights.weight_D)
    padded = -(-width * 4 // LINE_BYTES) * LINE_BYTES // 4
    weight, bias = aligned(padded, np.float32), aligned(padded, np.float32)
    weight[:width] = weights.weight_D.float().numpy()
    if weights.bias_D is not None:
        bias[:width] = weights.bias_D.float().numpy()
    norm = Norm(address(weight), address(bias), width, np.float32(weights.epsilon), int(weights.is_rms))
    return norm, (weight, bias)
