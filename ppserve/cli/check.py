"""Finds mistakes in a server's flags before any process is started.

It does not import torch, which takes seconds, so mistakes are reported at once.
"""

from __future__ import annotations

import os
from pathlib import Path

from ppserve.config import ServeConfig, ServerSettings
from ppserve.core.architecture import Architecture
from ppserve.core.partition import check_split, check_tensor_ranks, split_by_weight
from ppserve.errors import ConfigError
from ppserve.head.api.auth import ApiKeys
from ppserve.head.api.chat_template import ChatTemplate
from ppserve.head.api.tls import read_certificates
from ppserve.head.engine.placement import check_microbatches
from ppserve.head.listener import bound
from ppserve.model.checkpoint.opening import read_architecture

_GPU_DEVICES = ("nvidia*", "dxg", "nvhost-*", "nvgpu", "kfd")
"""Devices of NVIDIA's driver, of WSL, of Jetsons, and of AMD's driver."""


def check(config: ServeConfig, world_size: int) -> None:
    """Raise UsageError for the first mistake found. Stages may find further ones on their hosts."""
    server, grid = config.server, config.pipeline.grid(world_size)
    _check_ports(server)
    read_certificates(server)
    if server.api_key_file is not None:
        ApiKeys(server.api_key_file)
    if server.chat_template is not None:
        ChatTemplate.read(server.chat_template, {}, {})
    check_dtype(config)
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


def check_dtype(config: ServeConfig, dev: Path = Path("/dev")) -> None:
    """Raise ConfigError for float16 where no GPU can be. dev: the directory of devices.

    Stages ask torch, which is sure, but takes seconds to import."""
    if config.model.dtype != "float16" or os.environ.get("PPSERVE_GPU_REFERENCE") == "1":
        return
    if config.model.force_cpu or not any(list(dev.glob(name)) for name in _GPU_DEVICES):
        raise ConfigError("--dtype", "float16 needs a GPU; use bfloat16 or float32 on CPUs")


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
    for flag, port in flags.items():
        bound(server.host, port, flag).close()
        if port and port in taken:
            raise ConfigError(flag, f"{port} is taken by {taken[port]}")
        taken[port] = flag
