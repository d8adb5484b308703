"""Which device a stage gets, and in which types it computes there."""

from __future__ import annotations

import logging
import os

import torch

from ppserve.config import DeviceSettings, SchedulingSettings, ServeConfig
from ppserve.core.scheduling.config import MAX_PROMPT_TOKENS_PER_STEP
from ppserve.errors import ConfigError
from ppserve.model.cpu.backend import cpu_precision
from ppserve.model.cpu.kernels import variants
from ppserve.model.cpu.kernels.products import multiplies_bfloat16
from ppserve.model.cuda.backend import DeviceOptions
from ppserve.process.environment import RankEnvironment
from ppserve.process.limits import available_cores
from ppserve.stage.device import REFERENCE, DeviceSetup

log = logging.getLogger(__name__)


def choose(
    config: ServeConfig, environment: RankEnvironment, stored_dtype: str, stored_quantization: str = "none"
) -> DeviceSetup:
    """Choose the device, by the rank's place among `devices_here`, and the types of numbers. Raises
    ConfigError."""
    stages_here = environment.local_world_size
    devices = devices_here(config, stages_here)
    device = devices[environment.local_rank]
    stages_on_gpu = devices.count(device)
    on_gpu = device.type == "cuda"
    reference = not on_gpu and os.environ.get(REFERENCE) == "1"
    quantization = config.model.quantization
    if quantization == "auto":
        keeps = not on_gpu and not reference and config.model.dtype == "auto"
        quantization = stored_quantization if keeps else "none"
    kv_dtype = config.cache.kv_dtype
    dtype = _resolve_dtype(config.model.dtype, stored_dtype, device, quantization)
    cores = available_cores()
    own_threads = max(1, cores // stages_here)
    threads = config.pipeline.threads or own_threads
    for flag, asked in (("--quantization", quantization), ("--kv-dtype", kv_dtype)):
        if asked in ("int8", "int4") and (on_gpu or reference):
            raise ConfigError(flag, f"{asked} needs a CPU; add --force-cpu or leave it out")
    if kv_dtype == "auto":
        kv_dtype = _own_kv_dtype(config.model.dtype, quantization, dtype, stored_dtype)
    if not on_gpu and environment.local_rank == 0 and threads > own_threads:
        many = f"--threads {threads}: stages have {threads * stages_here} threads here and may use {cores} cores"
        log.warning("%s; every step waits for threads that have none", many)
    options = _options(config.device, config.scheduling, kv_dtype)
    return DeviceSetup(
        device,
        dtype,
        stages_here,
        threads=threads,
        quantization=quantization,
        kv_dtype=kv_dtype,
        options=options,
        reference=reference,
        stages_on_gpu=stages_on_gpu if on_gpu else 1,
    )


def _own_kv_dtype(asked: str, quantization: str, dtype: str, stored_dtype: str) -> str:
    """Return the type of keys and values that `auto` means."""
    # With quantized weights it is the file's: float32 would double what a step reads.
    is_quantized = quantization != "none"
    return "bfloat16" if is_quantized and asked == "auto" and stored_dtype == "bfloat16" else dtype


def _options(device: DeviceSettings, scheduling: SchedulingSettings, kv_dtype: str) -> DeviceOptions:
    max_rows = scheduling.max_num_seqs
    max_step_rows = max_rows + (scheduling.prefill_chunk or MAX_PROMPT_TOKENS_PER_STEP)
    return DeviceOptions(device.batch_invariant, device.cuda_graphs, max_rows, kv_dtype, max_step_rows)


def devices_here(config: ServeConfig, count: int) -> tuple[torch.device, ...]:
    """Return the devices of this host's stages: those that were asked for, else GPUs in turn, else CPUs. Raises
    ConfigError."""
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


def _resolve_dtype(asked: str, stored: str, device: torch.device, quantization: str) -> str:
    """Return the type of weights and hidden states.

    `auto` means the fastest arithmetic that loses nothing of the file. There are two exceptions. GPUs compute
    float32 checkpoints in bfloat16, and before compute capability 8.0, where bfloat16 is only emulated, everything
    in float16. With quantized weights it is float32, because it has the same bits on all CPUs.
    """
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
