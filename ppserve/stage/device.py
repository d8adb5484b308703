"""The device of a stage: its backend, and the memory that it leaves for keys and values."""

from __future__ import annotations

import logging
import platform
from dataclasses import dataclass, field

import torch

from ppserve.core.figures import counted
from ppserve.core.kv_memory import cpu_kv_bytes
from ppserve.model.backend import AnyBackend
from ppserve.model.cpu.backend import CpuBackend
from ppserve.model.cpu.kernels import variants
from ppserve.model.cuda.backend import CudaBackend, DeviceOptions
from ppserve.process.limits import available_bytes

log = logging.getLogger(__name__)

# The KV cache's share of the memory that is free when weights are loaded.
_GPU_SHARE = 0.85

REFERENCE = "PPSERVE_GPU_REFERENCE"
"""If this variable is 1, CPUs compute as GPUs do, but slowly. Tests use it for everything but the kernels."""


@dataclass(frozen=True, slots=True)
class DeviceSetup:
    """The device and the arithmetic of one stage, and what it shares with the other stages of its host."""

    device: torch.device
    dtype: str
    stages_here: int
    """How many stages are on this machine."""
    threads: int = 1
    """The number of threads that compute together on the CPU."""
    quantization: str = "none"
    kv_dtype: str = "float32"
    """The type of keys and values."""
    options: DeviceOptions = field(default_factory=DeviceOptions)
    reference: bool = False
    """Whether the CPU takes a GPU's place, with the reference operators."""
    stages_on_gpu: int = 1
    """How many stages share the GPU and its memory."""

    @property
    def name(self) -> str:
        if self.device.type == "cuda":
            return f"{self.device} ({torch.cuda.get_device_name(self.device)})"
        kernels = "GPU's operators" if self.reference else variants.in_use()
        return f"cpu ({platform.machine()}, {kernels}, {counted(self.threads, 'thread')})"

    def backend(self) -> AnyBackend:
        """Make the backend. Raises ConfigError for a dtype that the device does not have."""
        if self.device.type == "cpu" and not self.reference:
            return CpuBackend(self.dtype, self.threads, self.quantization, self.kv_dtype)
        return CudaBackend(self.device, self.dtype, self.options)

    @property
    def kernel_variants(self) -> tuple[str, ...]:
        """The kernel variants that PPSERVE_CPU_KERNELS may name here, weakest first."""
        ours = self.device.type == "cpu" and not self.reference
        return variants.available(variants.features()) if ours else ()

    @property
    def untestable_reason(self) -> str | None:
        """Why passing the self-test proves nothing on this device; None: it does prove something."""
        if self.device.type == "cpu" or self.options.batch_invariant:
            return None
        return "torch's products choose a kernel by the number of rows, and few can be tried (--batch-invariant)"

    def bind_this_thread(self) -> None:
        """Bind this thread to the device, and set the number of torch's threads. Call this once, before
        computing."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            # With torch's default stream, stages that share a GPU would wait for each other.
            torch.cuda.set_stream(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]
            # This makes the device's context, which can hold up all threads for seconds.
            torch.zeros(1, device=self.device)
        else:
            # Threads of torch would spin on the cores of our kernels.
            torch.set_num_threads(self.threads if self.reference else 1)

    def raise_if_lost(self) -> None:
        """Raise torch.AcceleratorError if the device's context cannot be used any more. This does not wait."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).query()

    def kv_budget_bytes(self, weight_bytes: int, vocab_size: int, sequence_bytes: int) -> int:
        """Return the bytes that the KV cache may take.

        weight_bytes: those of the stage's weights, which are in memory. vocab_size: that of the model on the last
        stage, where tokens are drawn; 0 on other stages. sequence_bytes: those of a sequence of full length.
        """
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # memory that loading and the self-test have released is free for others
            free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
            share_bytes = gpu_share(free_bytes, total_bytes, weight_bytes, self.stages_on_gpu)
            return max(0, int((share_bytes - self.options.logits_bytes(vocab_size)) * _GPU_SHARE))
        # Other stages may still be loading weights. The last one to load sees what is really left, and the head
        # takes the number of blocks from the stage with the least room.
        return cpu_kv_bytes(available_bytes() // self.stages_here, sequence_bytes)


def gpu_share(free_bytes: int, total_bytes: int, own_bytes: int, stages: int) -> int:
    """Return the bytes that a stage may use in addition to its weights: what these leave of its part of the GPU's
    memory, but at most its part of what is free. own_bytes: those of its weights. stages: how many share the
    GPU."""
    return max(0, min(free_bytes // stages, total_bytes // stages - own_bytes))
