"""Finds mistakes in a server's flags before any process is started.

It does not import torch, which takes seconds, so mistakes are reported at once.
"""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

from ppserve.config import NetworkSettings, ServeConfig, ServerSettings
from ppserve.core.architecture import Architecture, Split, stage_layouts
from ppserve.core.figures import size_text
from ppserve.core.grid import RankGrid
from ppserve.core.kv_memory import sequence_blocks
from ppserve.core.partition import check_split, check_tensor_ranks, split_by_weight
from ppserve.errors import ConfigError
from ppserve.head.api.auth import ApiKeys
from ppserve.head.api.chat_template import ChatTemplate
from ppserve.head.api.tls import read_certificates
from ppserve.head.engine.placement import check_microbatches
from ppserve.head.listener import bound
from ppserve.model.checkpoint.opening import read_architecture
from ppserve.planning.forecast import ELEMENT_BYTES
from ppserve.process.head_endpoint import check_secret_file
from ppserve.process.limits import available_bytes
from ppserve.process.network import address_of, interfaces
from ppserve.process.tls import stage_context

_GPU_DEVICES = ("nvidia*", "dxg", "nvhost-*", "nvgpu", "kfd")
"""Devices of NVIDIA's driver, of WSL, of Jetsons, and of AMD's driver."""


def check(config: ServeConfig, world_size: int, num_here: int | None = None) -> None:
    """Raise UsageError for the first mistake found. Stages may find further ones on their hosts. num_here: the
    number of ranks on this host; None: all."""
    server, grid = config.server, config.pipeline.grid(world_size)
    _check_ports(server)
    read_certificates(server)
    if server.api_key_file is not None:
        ApiKeys(server.api_key_file)
    if server.chat_template is not None:
        ChatTemplate.read(server.chat_template, {}, {})
    _check_network(config.network)
    check_devices(config)
    _check_host_memory(config, num_here or world_size)
    arch = _architecture(config.model.path)
    if arch is not None:
        arch.context(config.model.max_model_len)
    if config.pipeline.transport == "local" and grid.pipeline * grid.tensor > 1:
        raise ConfigError("--transport", "local connects stages within one process; these are several")
    check_microbatches(config, grid.pipeline)
    if arch is not None:
        check_tensor_ranks(arch, grid.tensor)
        split = config.pipeline.layers or split_by_weight(arch, grid.pipeline)
        check_split(split, arch, grid.pipeline)
        _check_kv_memory(config, arch, grid)
    if config.server.trace is not None:
        _check_trace(config.server.trace)


def check_devices(config: ServeConfig, dev: Path = Path("/dev")) -> None:
    """Raise ConfigError for what needs a GPU where none can be. dev: the directory of devices.

    Stages ask torch, which is sure, but takes seconds to import."""
    if may_have_gpu(config, dev):
        return
    if config.pipeline.transport == "nccl":
        raise ConfigError("--transport", "nccl needs a GPU of its own for every stage")
    if config.model.dtype == "float16" and os.environ.get("PPSERVE_GPU_REFERENCE") != "1":
        raise ConfigError("--dtype", "float16 needs a GPU; use bfloat16 or float32 on CPUs")


def may_have_gpu(config: ServeConfig, dev: Path = Path("/dev")) -> bool:
    """Return whether stages may run on a GPU of this host. dev: the directory of devices."""
    return not config.model.force_cpu and any(list(dev.glob(name)) for name in _GPU_DEVICES)


def _check_network(network: NetworkSettings) -> None:
    """Raise ConfigError for what cannot be, also where only ranks on several hosts would use it."""
    if network.interface is not None:
        address_of(network.interface, interfaces(), version=4)
    if network.secret_file is not None:
        check_secret_file(network.secret_file)
    if network.stage_tls_cert is not None:
        stage_context(network, serves=True)


def _check_host_memory(config: ServeConfig, num_here: int) -> None:
    """Raise ConfigError if this host's memory cannot hold the keys and values of its stages. GPUs have their own
    memory."""
    asked, available = config.cache.kv_cache_memory, available_bytes()
    if asked is None or not available or may_have_gpu(config) or asked * num_here <= available:
        return
    each = "" if num_here == 1 else f" for each of {num_here} stages"
    problem = f"{size_text(asked)}{each} is more than this host has free: {size_text(available)}"
    raise ConfigError("--kv-cache-memory", problem)


def _check_kv_memory(config: ServeConfig, arch: Architecture, grid: RankGrid) -> None:
    """Raise ConfigError if --kv-cache-memory has no room for one full sequence on some stage, however the layers
    are divided and in the smallest type that --kv-dtype allows. Stages check what they really have."""
    asked, block_size = config.cache.kv_cache_memory, config.cache.block_size
    if asked is None:
        return
    even = Split((2 * -(-arch.num_layers // grid.pipeline),))
    layouts = stage_layouts(config.pipeline.layers or even)
    element_bytes = ELEMENT_BYTES.get(config.cache.kv_dtype, 2)
    token_bytes = max(
        replace(layout, num_tensor=grid.tensor).kv_bytes_per_token(arch, element_bytes) for layout in layouts
    )
    context = arch.context(config.model.max_model_len)
    needed = sequence_blocks(context, block_size) * block_size * token_bytes
    if asked < needed:
        needs = f"one sequence of {context} tokens takes at least {size_text(needed)} on a stage"
        problem = f"{size_text(asked)} is too little: {needs}; give it more, or lower --max-model-len"
        raise ConfigError("--kv-cache-memory", problem)


def _check_trace(path: Path) -> None:
    """Raise ConfigError if the file cannot be written. One that was not there is not left behind."""
    was_there = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ConfigError("--trace", f"cannot write {path}: {error.strerror}") from None
    if not was_there:
        path.unlink()


def _architecture(path: str) -> Architecture | None:
    """Read the model's architecture, for which the configuration of a hub id is downloaded. It is None if that
    needs torch: then stages check it."""
    place = Path(path).expanduser()
    if place.suffix in {".pt", ".pth"} or (place / "ckpt.pt").exists():
        return None
    return read_architecture(path)


def _check_ports(server: ServerSettings) -> None:
    flags = {"--port": server.port, "--metrics-port": server.metrics_port, "--http-port": server.http_port}
    taken: dict[int, str] = {}
    in_use: dict[str, ConfigError] = {}
    for flag, port in flags.items():
        try:
            bound(server.host, port, flag).close()
        except ConfigError as problem:
            if not (isinstance(problem.__cause__, OSError) and problem.__cause__.errno == errno.EADDRINUSE):
                raise
            in_use[flag] = problem
        if port and port in taken:
            raise ConfigError(flag, f"{port} is taken by {taken[port]}")
        taken[port] = flag
    if in_use:
        first, *others = in_use
        too = f", and so are the ports of {' and '.join(others)}" if others else ""
        free = " ".join(f"{flag} 0" for flag in in_use)
        raise ConfigError(first, f"{in_use[first].problem}{too}; this takes what is free: {free}")
