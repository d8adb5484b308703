"""The CPU: kernels for which a row's result depends on that row alone, not on chunks, other rows or threads.

Whatever the dtype, results are float32. `bfloat16` says how weights, keys, values and hidden states are stored,
and linear layers round their inputs to it; sums, biases, norms, activations and attention are float32. With `int8`
weights each output has a scale, each row of inputs has one of its own, and sums are exact integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ppserve.core.architecture import Architecture, StageLayout
from ppserve.core.cut import Cut
from ppserve.model.backend import (
    AttentionParts,
    KVCache,
    Linear,
    MLPParts,
    Operator,
    Read,
    Reading,
    StageModel,
    StepInputs,
    Sublayer,
)
from ppserve.model.checkpoint import Matrix
from ppserve.model.compiled.jit import ForSettings, check_numba
from ppserve.model.cpu.activations import CpuActivation
from ppserve.model.cpu.fusing import attention_sublayer, joined_sublayers, mlp_sublayer
from ppserve.model.cpu.huge_pages import HugePages
from ppserve.model.cpu.kernels import variants
from ppserve.model.cpu.kernels.attention_tile import attention_kernels
from ppserve.model.cpu.kernels.operations import OPERATIONS
from ppserve.model.cpu.kernels.products import micro_kernels
from ppserve.model.cpu.kernels.storage import Storage
from ppserve.model.cpu.kernels.work import work
from ppserve.model.cpu.kv_cache import CpuCache, block_bytes
from ppserve.model.cpu.linear import FusedHead, PackedLinear
from ppserve.model.cpu.norm import CpuNorm
from ppserve.model.cpu.precision import cpu_precision, dtype_name
from ppserve.model.cpu.scratch_memory import ScratchMemory
from ppserve.model.cpu.thread_pool import ThreadPool
from ppserve.model.sampling_slices import read_slices
from ppserve.model.timing import HostTiming, Timing


class CpuBackend:
    """num_threads: how many compute at once, the calling thread included. Raises ConfigError."""

    device = torch.device("cpu")
    read_rows_at_once = 64  # of GPT-2's vocabulary 13 MB
    more_head_rows: tuple[int, ...] = ()

    def __init__(
        self, dtype: str, num_threads: int = 1, quantization: str = "none", kv_dtype: str | None = None
    ) -> None:
        check_numba()
        self.precision = cpu_precision(dtype, quantization, kv_dtype)
        variant = variants.in_use()
        # Decided by what the CPU is, never by timing, so that a restarted stage computes the same bits.
        self._product = micro_kernels(dtype_name(self.precision.weights), variant, variants.features())[0]
        # More rows than pass at once are more blocks of rows.
        self.more_rows: tuple[int, ...] = (self._product.rows_at_once + 8,)
        self._attention = attention_kernels(dtype_name(self.precision.kv), variant)[0]
        kinds = (self._product, self._attention, Storage(dtype_name(self.precision.hidden)), Storage("float32"))
        self._thread_pool = ThreadPool(num_threads, ForSettings(work, *kinds))
        self._scratch_memory = ScratchMemory(self._product, num_threads)
        self._memory = HugePages()

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.precision.hidden)

    def linear(self, weight_NK: Matrix, bias_N: torch.Tensor | None) -> Linear:
        precision = dtype_name(self.precision.weights)
        return PackedLinear(
            weight_NK, bias_N, precision, self._product, self._thread_pool, self._scratch_memory, self._memory
        )

    def norm(self, weight_D: torch.Tensor, bias_D: torch.Tensor | None, epsilon: float) -> Operator:
        return CpuNorm(weight_D, bias_D, epsilon)

    def activation(self, name: str) -> Operator:
        return CpuActivation(name)

    def fused_attention(self, parts: AttentionParts) -> Sublayer | None:
        return attention_sublayer(parts, self._thread_pool, self._scratch_memory)

    def fused_mlp(self, parts: MLPParts) -> Sublayer | None:
        return mlp_sublayer(parts, self._thread_pool, self._scratch_memory)

    def fused_head(self, norm: Operator, linear: Linear) -> Read | None:
        assert isinstance(norm, CpuNorm)
        assert isinstance(linear, PackedLinear)
        return FusedHead(norm, linear)

    def joined(self, sublayers: Sequence[Sublayer | None]) -> Sublayer | None:
        return joined_sublayers(sublayers)

    def block_bytes(self, arch: Architecture, layout: StageLayout, block_size: int) -> int:
        return block_bytes(arch, layout, block_size, self.precision.kv)

    def make_cache(
        self, arch: Architecture, layout: StageLayout, num_blocks: int, block_size: int, *, num_ahead: int = 0
    ) -> CpuCache:
        workers = self._thread_pool, self._scratch_memory
        return CpuCache(arch, layout, num_blocks, block_size, self._attention, workers, num_ahead=num_ahead)

    def recorded(self, model: StageModel, cache: KVCache) -> StageModel:
        return model

    def read_logits(self, inputs: StepInputs, pieces_Rv: Iterator[torch.Tensor], vocabulary: Cut) -> Reading:
        results = read_slices(inputs.rows.plan, pieces_Rv, inputs.gather, vocabulary)
        return lambda: results

    def timing(self) -> Timing:
        return HostTiming()

    def describe(self) -> str:
        """The arithmetic; kernel variants that share it give the same bits."""
        return f"{OPERATIONS[self._product.operation].arithmetic}, own kernels"
