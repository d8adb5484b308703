"""The CPU: kernels for which a row's result depends on that row alone, not on chunks, other rows or threads.

Whatever the dtype, results are float32. `bfloat16` says how weights, keys, values and hidden states are stored,
and linear layers round their inputs to it; sums, biases, norms, activations and attention are float32.
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
from ppserve.model.cpu.kernels import variants
from ppserve.model.cpu.kernels.operations import OPERATIONS
from ppserve.model.cpu.kernels.products import micro_kernels
from ppserve.model.cpu.kv_cache import CpuCache, block_bytes
from ppserve.model.cpu.linear import PackedLinear
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
        self._product = dtype
        # Decided by what the CPU is, never by timing, so that a restarted stage computes the same bits.
        self._kind = micro_kernels(self._product, variants.in_use(), variants.features())[0]

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.precision.weights)

    def linear(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> Linear:
        return PackedLinear(weight_NK, bias_N, self._product, self._kind, self._threads)

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
        # The norms are torch's own.
        norms = f"norms by torch for {torch.backends.cpu.get_cpu_capability()}"
        return f"{OPERATIONS[self._kind.operation].arithmetic}, {norms}"
