"""The CPU: kernels for which a row's result depends on that row alone, not on chunks, other rows or threads.

Whatever the dtype, everything between two accesses to the cache or to weights is float32: `bfloat16` says how
weights, keys, values and hidden states are stored. Where oneDNN's bfloat16 kernels are used (CPUs with AVX-512
BF16 or AMX) every linear layer also rounds its inputs, its bias and its outputs, logits included, to bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn.functional import layer_norm

from ppserve.core.architecture import Architecture, StageLayout
from ppserve.core.plan import Drawn, Scored, StepPlan
from ppserve.errors import ConfigError
from ppserve.model import sampling
from ppserve.model.backend import Linear, Operator, Precision
from ppserve.model.cpu.activations import activation_for
from ppserve.model.cpu.attention import BlockAttention
from ppserve.model.cpu.kv_cache import CpuCache, block_bytes
from ppserve.model.cpu.linear import PackedLinear, PanelLinear, onednn_is_faster
from ppserve.model.cpu.threads import Threads


def cpu_precision(dtype: str) -> Precision:
    """Raises ConfigError for a dtype that CPUs do not have."""
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError("--dtype", f"{dtype} needs a GPU; use bfloat16 or float32 on CPUs")
    stored: torch.dtype = getattr(torch, dtype)
    return Precision(weights=stored, kv=stored, compute=torch.float32, hidden=stored)


class CpuBackend:
    """num_threads: how many compute at once, the calling thread included. Raises ConfigError."""

    device = torch.device("cpu")

    def __init__(self, dtype: str, num_threads: int = 1) -> None:
        self.precision = cpu_precision(dtype)
        self._threads = Threads(num_threads)
        # Decided by what the CPU is, never by timing, so that a restarted stage computes the same bits.
        self._uses_onednn = onednn_is_faster(self.precision.weights)

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.precision.weights)

    def linear(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> Linear:
        weight_NK = self.stored(weight_NK)
        if self._uses_onednn:
            return PackedLinear(weight_NK, bias_N)
        return PanelLinear(weight_NK, bias_N, self._threads)

    def norm(self, weight_D: torch.Tensor, bias_D: torch.Tensor | None, epsilon: float) -> Operator:
        weight_D, bias_D = weight_D.float(), None if bias_D is None else bias_D.float()
        return partial(layer_norm, normalized_shape=weight_D.shape, weight=weight_D, bias=bias_D, eps=epsilon)

    def activation(self, name: str) -> Operator:
        return activation_for(name)

    def block_bytes(self, arch: Architecture, layout: StageLayout, block_size: int) -> int:
        return block_bytes(arch, layout, block_size, self.precision.kv)

    def make_cache(
        self, arch: Architecture, layout: StageLayout, num_blocks: int, block_size: int, *, serves: bool = False
    ) -> CpuCache:
        return CpuCache(arch, layout, num_blocks, block_size, self.precision.kv, self._threads, prefaults=serves)

    def read_logits(
        self, plan: StepPlan, pieces_RV: Iterator[torch.Tensor]
    ) -> tuple[tuple[Drawn, ...], tuple[Scored, ...]]:
        return sampling.read_logits(plan, pieces_RV)

    def synchronize(self) -> None:
        """Nothing to wait for: every operator returns when it is done."""

    def describe(self) -> str:
        linear = PackedLinear if self._uses_onednn else PanelLinear
        # The norms are torch's own.
        norms = f"torch for {torch.backends.cpu.get_cpu_capability()}"
        return f"{linear.__name__}, {BlockAttention.__name__}, {norms}"
