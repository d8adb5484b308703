"""The backend of GPUs. A step has no loop over sequences. Steps that repeat are recorded. The host waits only for
tokens.

Weights, operators' results and hidden states are in one dtype. Keys and values are in it too, or in another on
request. Sums are float32.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from ppserve.core.architecture import Architecture, Cut, StageLayout
from ppserve.core.scheduling.config import MAX_PROMPT_TOKENS_PER_STEP
from ppserve.errors import ConfigError
from ppserve.model.backend import (
    CachedModel,
    Computing,
    Linear,
    LoadedModel,
    Progress,
    Reading,
    StageModel,
    Timing,
)
from ppserve.model.checkpoint import Checkpoint, Matrix
from ppserve.model.cuda.cache import DeviceCache, DeviceInputs, bucket_sizes
from ppserve.model.cuda.device import Accelerator, CudaDevice, Readback, Staging
from ppserve.model.cuda.graphs import RecordedStage
from ppserve.model.cuda.operators import Operators
from ppserve.model.cuda.sampling import read_rows
from ppserve.model.loaded import cached, load
from ppserve.model.stock import PlainLinear, TorchBackend

READ_ROWS_AT_ONCE = 256  # 51 MB of logits with GPT-2's vocabulary
# What drawing takes for each row and id: logits twice, weights, float64 sums, and ranked ids.
_LOGITS_BYTES = 96


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """How a stage computes on a device."""

    batch_invariant: bool = False
    """Whether a linear layer's result for a row must not depend on the other rows, as it may with torch's
    product."""
    graphs: bool = True
    """Whether steps with one row per slice are recorded."""
    max_rows: int = 256
    """The rows of the largest recorded step."""
    kv_dtype: str | None = None
    """The type of keys and values; None: the same as that of all else."""
    max_step_rows: int = 256 + MAX_PROMPT_TOKENS_PER_STEP
    """The rows of the largest step, recorded or not."""

    def logits_bytes(self, vocab_size: int) -> int:
        """Return the most bytes that drawing takes on the last stage, in addition to weights and cache."""
        return _LOGITS_BYTES * vocab_size * max(READ_ROWS_AT_ONCE, self.max_rows)


class CudaBackend(TorchBackend):
    """The backend of a GPU. With the CPU as its device, and torch's operators, it is a reference for tests."""

    read_rows_at_once = READ_ROWS_AT_ONCE
    reads_masks_last = False  # they are copied with the step's other arrays

    def __init__(
        self,
        device: torch.device,
        dtype: str,
        options: DeviceOptions | None = None,
        operators: Operators | None = None,
        accelerator: Accelerator | None = None,
    ) -> None:
        """operators, accelerator: for tests, others than the device's own."""
        self.options = options or DeviceOptions()
        super().__init__(device, dtype, self.options.kv_dtype)
        self.accelerator = accelerator or (CudaDevice if device.type == "cuda" else Accelerator)(device)
        self.operators = operators or _own_operators(device)
        self.staging = Staging(self.accelerator)
        self.readback = Readback(self.accelerator)
        rows = {*bucket_sizes(self.options.max_step_rows), *bucket_sizes(self.options.max_rows)}
        self.more_rows = _above_128(rows)
        # The rows of a recorded step are read out all at once.
        most = max(self.read_rows_at_once, self.options.max_rows)
        self.more_head_rows = _above_128({min(count, most) for count in (*rows, most)})

    def compile(self, report: Callable[[int, int], object], num_tensor: int = 1) -> None:
        """Triton compiles its kernels in the self-test, for the shapes that it meets."""

    def load(
        self, checkpoint: Checkpoint, layout: StageLayout, progress: Progress = lambda done, total: None
    ) -> LoadedModel:
        return load(checkpoint, layout, self, progress)

    def linear(self, weight_NK: Matrix, bias_N: torch.Tensor | None, for_selftest: bool = False) -> Linear:
        if self.options.batch_invariant:
            return PlainLinear(self.stored(weight_NK[:]), bias_N, self.operators.product)
        return super().linear(weight_NK, bias_N)

    def make_cache(
        self, arch: Architecture, layout: StageLayout, num_blocks: int, block_size: int, *, populate: bool = False
    ) -> DeviceCache:
        blocks = num_blocks, block_size
        return DeviceCache(arch, layout, blocks, self.precision.kv, self.operators, self.staging)

    def with_cache(
        self, model: StageModel[DeviceInputs], num_blocks: int, block_size: int, *, populate: bool = False
    ) -> CachedModel:
        cache = self.make_cache(model.arch, model.layout, num_blocks, block_size, populate=populate)
        return cached(self.recorded(model, cache), cache, model.layout, self)

    def recorded(self, model: StageModel[DeviceInputs], cache: DeviceCache) -> Computing[DeviceInputs]:
        """Record the model's steps that have one row per slice, which takes seconds and writes to the cache.
        Return the model itself if its steps may not be recorded."""
        # Recorded work cannot wait for other ranks.
        if not self.options.graphs or model.layout.num_tensor > 1:
            return model
        return RecordedStage(model, cache, bucket_sizes(self.options.max_rows), self.accelerator, self.readback)

    def read_logits(self, inputs: DeviceInputs, parts_Rv: Iterator[torch.Tensor], vocabulary: Cut) -> Reading:
        first, columns = 0, []
        for own_Rv in parts_Rv:
            logits_RV = inputs.gather.all(own_Rv, vocabulary)
            columns.append(read_rows(self.operators, logits_RV, inputs.draws, inputs.arrays, first))
            first += len(logits_RV)
        return self.readback.reading(inputs.rows.plan, torch.cat(columns) if columns else None)

    def timing(self) -> Timing:
        return self.accelerator.timing()

    def describe(self) -> str:
        linears = self.operators.name if self.options.batch_invariant else "torch"
        return f"{self.accelerator.name}; attention by {self.operators.name}, linears by {linears}"


def _above_128(rows: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(count for count in rows if count > 128))


def _own_operators(device: torch.device) -> Operators:
    if device.type != "cuda":
        return Operators()
    # Triton comes with torch for CUDA, and not with torch for the CPU.
    from ppserve.model.cuda.triton_operators import TritonOperators

    operators = TritonOperators()
    launch_once(operators, device)
    return operators


def launch_once(operators: Operators, device: torch.device) -> None:
    """Launch a kernel. Raise ConfigError where Triton, which compiles C, cannot launch anything."""
    try:
        operators.running_sums(torch.zeros(1, 1, device=device))
    except (torch.AcceleratorError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(
            "Triton",
            f"it cannot launch a kernel on {device}: {error}. It compiles a C file for that: install a C compiler"
            " and its headers (Debian: gcc libc6-dev), or name one in CC",
        ) from error
