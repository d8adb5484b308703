"""Where and in which arithmetic a stage computes, and which cores and memory are left to it."""

from __future__ import annotations

import logging
import os
import platform
from dataclasses import dataclass, field

import torch

from ppserve.config import ServeConfig
from ppserve.core.figures import counted
from ppserve.core.kv_memory import cpu_kv_bytes
from ppserve.core.scheduling.config import MAX_PROMPT_TOKENS_PER_STEP
from ppserve.errors import ConfigError
from ppserve.model.backend import Backend
from ppserve.model.cpu.backend import CpuBackend, cpu_precision
from ppserve.model.cpu.kernels import variants
from ppserve.model.cpu.kernels.products import multiplies_bfloat16
from ppserve.model.cuda.backend import CudaBackend, DeviceOptions
from ppserve.process.environment import RankEnvironment
from ppserve.process.limits import available_bytes, available_cores

log = logging.getLogger(__name__)

# The cache's share of what is free once weights are loaded.
_GPU_SHARE = 0.85

REFERENCE = "PPSERVE_GPU_REFERENCE"
"""Set to 1: CPUs compute as GPUs do, slowly. For tests of what is no kernel."""


@dataclass(frozen=True, slots=True)
class DeviceSetup:
    """The device and arithmetic of one stage, and what it shares with the other stages of its host."""

    device: torch.device
    dtype: str
    stages_here: int
    """Stages on this machine."""
    threads: int = 1
    """Its own, on the CPU."""
    quantization: str = "none"
    kv_dtype: str = "float32"
    """Type of keys and values."""
    options: DeviceOptions = field(default_factory=DeviceOptions)
    reference: bool = False
    """The CPU takes a GPU's place, with the reference operators."""
    stages_on_gpu: int = 1
    """How many share a GPU and its memory."""

    @property
    def name(self) -> str:
        if self.device.type == "cuda":
            return f"{self.device} ({torch.cuda.get_device_name(self.device)})"
        kernels = "GPU's operators" if self.reference else variants.in_use()
        return f"cpu ({platform.machine()}, {kernels}, {counted(self.threads, 'thread')})"

    def backend(self) -> Backend:
        """Raises ConfigError for a dtype that the device does not have."""
        if self.device.type == "cpu" and not self.reference:
            return CpuBackend(self.dtype, self.threads, self.quantization, self.kv_dtype)
        return CudaBackend(self.device, self.dtype, self.options)

    @property
    def kernel_variants(self) -> tuple[str, ...]:
        """The variants of which PPSERVE_CPU_KERNELS may name one, weakest first."""
        ours = self.device.type == "cpu" and not self.reference
        return variants.available(variants.features()) if ours else ()

    @property
    def untestable_reason(self) -> str | None:
        """Why passing the self-test proves nothing on this device; None where it proves something."""
        if self.device.type == "cpu" or self.options.batch_invariant:
            return None
        return "torch's products choose a kernel by the number of rows, and few can be tried (--batch-invariant)"

    def bind_this_thread(self) -> None:
        """Bind this thread to the device, and torch's threads to its cores. Call it once, before computing."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            # In torch's default stream, stages that share a GPU would wait for each other.
            torch.cuda.set_stream(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]
            # Makes the device's context, which can hold up all threads for seconds.
            torch.zeros(1, device=self.device)
        else:
            # Torch's threads would spin on our kernels' cores.
            torch.set_num_threads(self.threads if self.reference else 1)

    def probe(self) -> None:
        """Raises torch.AcceleratorError for a poisoned context. Waits for nothing."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).query()

    def kv_budget_bytes(self, weight_bytes: int = 0, vocab_size: int = 0, sequence_bytes: int = 0) -> int:
        """What the KV cache may take. weight_bytes: the stage's, which are in memory. vocab_size: on the last
        stage, where rows are drawn. sequence_bytes: of a sequence of full length."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # gives others what loading and the self-test let go
            free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
            share_bytes = gpu_share(free_bytes, total_bytes, weight_bytes, self.stages_on_gpu)
            return max(0, int((share_bytes - self.options.logits_bytes(vocab_size)) * _GPU_SHARE))
        # Another stage may still load its weights; the last one to load finds what is left, and the head takes
        # the number of blocks from the stage with least room.
        return cpu_kv_bytes(available_bytes() // self.stages_here, sequence_bytes)


def choose(config: ServeConfig, environment: RankEnvironment, stored_dtype: str) -> DeviceSetup:
    """The device, by its place among `devices_here`, and dtype. Raises ConfigError."""
    stages_here = environment.local_world_size
    devices = devices_here(config, stages_here)
    device = devices[environment.local_rank]
    stages_on_gpu = devices.count(device)
    on_gpu = device.type == "cuda"
    quantization = config.model.quantization
    kv_dtype = config.cache.kv_dtype
    dtype = _resolve_dtype(config.model.dtype, stored_dtype, device, quantization)
    cores = available_cores()
    own_threads = max(1, cores // stages_here)
    threads = config.pipeline.threads or own_threads
    reference = not on_gpu and os.environ.get(REFERENCE) == "1"
    for flag, asked in (("--quantization", quantization), ("--kv-dtype", kv_dtype)):
        if asked in ("int8", "int4") and (on_gpu or reference):
            raise ConfigError(flag, f"{asked} needs a CPU; add --force-cpu or leave it out")
    if kv_dtype == "auto":
        kv_dtype = _own_kv_dtype(config, dtype, stored_dtype)
    if not on_gpu and environment.local_rank == 0 and threads > own_threads:
        many = f"--threads {threads}: stages have {threads * stages_here} threads here and may use {cores} cores"
        log.warning("%s; every step waits for threads that have none", many)
    options = _options(config, kv_dtype)
    arithmetic = dtype, stages_here, threads, quantization, kv_dtype
    return DeviceSetup(device, *arithmetic, options, reference, stages_on_gpu if on_gpu else 1)


def _own_kv_dtype(config: ServeConfig, dtype: str, stored_dtype: str) -> str:
    # Beside quantized weights the file's: float32 would double what a step reads.
    is_quantized = config.model.quantization != "none"
    return "bfloat16" if is_quantized and config.model.dtype == "auto" and stored_dtype == "bfloat16" else dtype


def _options(config: ServeConfig, kv_dtype: str) -> DeviceOptions:
    max_rows = config.scheduling.max_num_seqs
    max_step_rows = max_rows + (config.scheduling.prefill_chunk or MAX_PROMPT_TOKENS_PER_STEP)
    flags = config.device
    return DeviceOptions(flags.batch_invariant, flags.cuda_graphs, max_rows, kv_dtype, max_step_rows)


def devices_here(config: ServeConfig, count: int) -> tuple[torch.device, ...]:
    """This host's devices: as asked for, else GPUs in turn, else CPUs. Raises ConfigError."""
    asked, num_gpus = config.device.devices, torch.cuda.device_count()
    if asked is None:
        num_gpus = 0 if config.model.force_cpu else num_gpus
        return tuple(torch.device("cuda", i % num_gpus) if num_gpus else torch.device("cpu") for i in range(count))
    if len(asked) != count:
        raise ConfigError("devices", f"{len(asked)} devices for {count} stages")
    return tuple(_device(name, num_gpus) for name in asked)


def _device(name: str, num_gpus: int) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError("devices", f"{name!r} is not a device such as 'cuda:0' or 'cpu'") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda" or (device.index or 0) >= num_gpus:
        raise ConfigError("devices", f"{name!r} is not here: {num_gpus} GPUs are, and 'cpu'")
    return torch.device("cuda", device.index or 0)


def gpu_share(free_bytes: int, total_bytes: int, own_bytes: int, stages: int) -> int:
    """A stage's bytes beside its weights, of `own_bytes`: its part of all, at most of what is free."""
    return max(0, min(free_bytes // stages, total_bytes // stages - own_bytes))


def lacks_memory(error: Exception) -> bool:
    """Whether a GPU's memory was too small: torch, cuBLAS and Triton share these words."""
    said = str(error)
    is_memory = "out of memory" in said or "ALLOC_FAILED" in said
    return is_memory and isinstance(error, RuntimeError)


def in_words(error: Exception) -> str:
    """Say the error, with what helps where a GPU's memory was too small."""
    said = str(error) or type(error).__name__
    if not lacks_memory(error):
        return said
    return f"{said}; less is taken with --kv-cache-memory, with a lower --max-num-seqs, or with --cuda-graphs off"


def _resolve_dtype(asked: str, stored: str, device: torch.device, quantization: str) -> str:
    """`auto` is the fastest arithmetic that loses nothing of the file. But GPUs run float32 checkpoints in
    bfloat16, and before compute capability 8.0, which only emulates it, in float16.
    Beside quantized weights it is float32, whose bits all CPUs share."""
    if device.type == "cuda":
        if asked != "auto":
            return asked
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "float16"
        return "bfloat16" if stored == "float32" else stored
    if asked != "auto":
        cpu_precision(asked)
        return asked
    if quantization != "none":
        return "float32"
    has_units = multiplies_bfloat16(variants.in_use(), variants.features())
    return "bfloat16" if stored == "bfloat16" and has_units else "float32"
