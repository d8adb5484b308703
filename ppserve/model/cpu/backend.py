"""The CPU: kernels for which a row's result depends on that row alone, not on chunks, other rows or threads.

The dtype says how numbers are stored: operators give float32 whatever it is. With `bfloat16`, weights, keys,
values and hidden states are stored in it, and linear layers round their inputs to it; sums, biases, norms,
activations and attention are float32. With `int8` weights, each output and each row of inputs has a scale, and
sums are exact integers. With `int4` weights, each group of 32 inputs has scales of its own (`four_bits`), and the
LM head has int8 weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ppserve.core.architecture import Architecture, Cut, StageLayout
from ppserve.errors import ConfigError
from ppserve.model import sampling_kernels
from ppserve.model.backend import (
    INT4,
    AttentionWeights,
    CachedModel,
    Head,
    HostTiming,
    LoadedModel,
    MLPWeights,
    NormWeights,
    Operator,
    Precision,
    Progress,
    Reading,
    ResidualWeights,
    StageModel,
    Sublayer,
    Timing,
)
from ppserve.model.checkpoint import Checkpoint, Matrix
from ppserve.model.compiled.jit import check_numba
from ppserve.model.compiled.together import compile_together
from ppserve.model.cpu.int8_cache import check_int8_cache
from ppserve.model.cpu.kernels import variants
from ppserve.model.cpu.kernels.attention_tile import attention_kernels
from ppserve.model.cpu.kernels.exchange import EXCHANGE
from ppserve.model.cpu.kernels.memory import Arena
from ppserve.model.cpu.kernels.operations import OPERATIONS
from ppserve.model.cpu.kernels.products import micro_kernels
from ppserve.model.cpu.kernels.storage import Storage
from ppserve.model.cpu.kernels.work import OUTPUT, make_work
from ppserve.model.cpu.kv_cache import CpuCache, CpuInputs, block_bytes
from ppserve.model.cpu.linear import PackedLinear, PackedWeights
from ppserve.model.cpu.scratch import ScratchMemory
from ppserve.model.cpu.sublayers import PlainMLP, PlainSublayer, fuse, lm_head, norm_operator
from ppserve.model.cpu.thread_pool import ThreadPool
from ppserve.model.loaded import cached, load
from ppserve.model.sampling import read_logits

QUANTIZED = {"int8": torch.int8, "int4": INT4}
"""The type in which linear layers' weights are kept, by `--quantization`."""


def cpu_precision(dtype: str, quantization: str = "none", kv_dtype: str | None = None) -> Precision:
    """Return the types in which the CPU keeps and computes numbers. kv_dtype: the type of keys and values; None:
    `dtype`. Raises ConfigError for a dtype that CPUs do not have."""
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError("--dtype", f"{dtype} needs a GPU; use bfloat16 or float32 on CPUs")
    hidden: torch.dtype = getattr(torch, dtype)
    weights = QUANTIZED.get(quantization, hidden)
    return Precision(weights, getattr(torch, kv_dtype or dtype), compute=torch.float32, hidden=hidden)


class CpuBackend:
    """The backend of CPUs, in one precision. num_threads: how many compute at once, the calling thread included.
    Raises ConfigError."""

    device = torch.device("cpu")
    read_rows_at_once = 64  # 13 MB of logits with GPT-2's vocabulary
    reads_masks_last = True
    more_head_rows: tuple[int, ...] = ()

    def __init__(
        self, dtype: str, num_threads: int = 1, quantization: str = "none", kv_dtype: str | None = None
    ) -> None:
        check_numba()
        self.precision = precision = cpu_precision(dtype, quantization, kv_dtype)
        variant = variants.in_use()
        # The kernels are chosen by the CPU's features, never by timing: a restarted stage computes the same bits.
        self._product, self._head_product = (
            micro_kernels(_name(weights), variant, variants.features())[0]
            for weights in (precision.weights, precision.head)
        )
        # More rows than `rows_at_once` are computed in several blocks: the self-test tries that, too.
        self.more_rows: tuple[int, ...] = (self._product.rows_at_once + 8,)
        self._attention = attention_kernels(_name(precision.kv), variant)[0]
        stored = Storage(_name(precision.hidden))
        self._work = make_work(self._product, self._head_product, self._attention, stored)
        self._thread_pool = ThreadPool(num_threads, self._work)
        self._scratch = ScratchMemory(self._product, num_threads)
        self._head_scratch = ScratchMemory(self._head_product, num_threads)
        self._arena = Arena()

    def compile(self, report: Callable[[int, int], object], num_tensor: int = 1) -> None:
        # From long to short, so that no process waits long for another at the end.
        of_ranks = [EXCHANGE] if num_tensor > 1 else []
        compile_together([*reversed(self._work.kernels), *of_ranks, *sampling_kernels.KERNELS], report)

    def load(
        self, checkpoint: Checkpoint, layout: StageLayout, progress: Progress = lambda done, total: None
    ) -> LoadedModel:
        return load(checkpoint, layout, self, progress)

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.precision.hidden)

    def linear(self, weight_NK: Matrix, bias_N: torch.Tensor | None, for_selftest: bool = False) -> PackedLinear:
        # An arena lives as long as any of its arrays: a probe, which is dropped soon, must not be in that of
        # weights.
        arena = Arena() if for_selftest else self._arena
        packed = PackedWeights(weight_NK, bias_N, self.precision.weights, self._product, arena)
        return PackedLinear(packed, self._thread_pool, self._scratch)

    def lm_head(self, weight_NK: Matrix) -> PackedLinear:
        packed = PackedWeights(weight_NK, None, self.precision.head, self._head_product, self._arena)
        return PackedLinear(packed, self._thread_pool, self._head_scratch, OUTPUT)

    def check(self, weights: ResidualWeights[PackedLinear]) -> None:
        if self.precision.kv == torch.int8 and isinstance(weights.of, AttentionWeights):
            check_int8_cache(weights.of, weights.pre_norm)

    def norm(self, weights: NormWeights) -> Operator:
        return norm_operator(weights, self._thread_pool, self._scratch)

    def attention(self, weights: AttentionWeights[PackedLinear]) -> Sublayer[CpuInputs]:
        return PlainSublayer(weights, self._thread_pool)

    def mlp(self, weights: MLPWeights[PackedLinear]) -> Sublayer[CpuInputs]:
        return PlainMLP(weights, self._thread_pool, self._scratch)

    def fused(self, lines: Sequence[ResidualWeights[PackedLinear]]) -> Sublayer[CpuInputs] | None:
        return fuse(lines, self._thread_pool)

    def head(self, norm: NormWeights, linear: PackedLinear) -> Head:
        return lm_head(norm, linear)

    def block_bytes(self, arch: Architecture, layout: StageLayout, block_size: int) -> int:
        return block_bytes(arch, layout, block_size, self.precision.kv)

    def make_cache(
        self, arch: Architecture, layout: StageLayout, num_blocks: int, block_size: int, *, populate: bool = False
    ) -> CpuCache:
        blocks = num_blocks, block_size
        return CpuCache(arch, layout, blocks, self._attention, self._scratch, populate=populate)

    def with_cache(
        self, model: StageModel[CpuInputs], num_blocks: int, block_size: int, *, populate: bool = False
    ) -> CachedModel:
        layout = model.layout
        cache = self.make_cache(model.arch, layout, num_blocks, block_size, populate=populate)
        return cached(model, cache, layout, self)

    def read_logits(self, inputs: CpuInputs, parts_Rv: Iterator[torch.Tensor], vocabulary: Cut) -> Reading:
        results = read_logits(inputs.rows.plan, parts_Rv, inputs.gather, vocabulary)
        return lambda: results

    def timing(self) -> Timing:
        return HostTiming()

    def describe(self) -> str:
        """Return the arithmetic's name. Kernel variants with the same arithmetic give the same bits."""
        return f"{OPERATIONS[self._product.operation].arithmetic}, own kernels"


def _name(dtype: torch.dtype) -> str:
    """Return a dtype's name: `float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")
