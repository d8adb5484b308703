"""The operator's configuration: parsed once by `cli`, frozen, and handed to each room as the part that it needs.

Sizes are bytes, times are seconds. None means `auto`: decided at start-up or while serving.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ppserve.core.architecture import Split
from ppserve.core.grid import RankGrid
from ppserve.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("none", "int8", "int4")
KV_DTYPES = ("auto", "float32", "bfloat16", "int8")
TRANSPORTS = ("auto", "nccl", "gloo", "shm", "local")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which weights, and how they are kept."""

    path: str = "tiny"
    """`tiny`, a directory, a file or a hub id."""
    dtype: str = "auto"
    quantization: str = "none"
    """Type of the weights of the linear layers and the LM head."""
    force_cpu: bool = False
    served_model_name: tuple[str, ...] = ()
    """What callers call the model; answers carry the first. None given: the hub id, or the last part of `path`."""
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """How the model is cut, and how stages exchange hidden states."""

    layers: Split | None = None
    """Per stage; None = balanced."""
    microbatches: int | None = None
    transport: str = "auto"
    threads: int | None = None
    """Computing threads per stage; None = the host's cores divided evenly among its stages."""
    tensor_parallel: int = 1
    """Ranks that share the layers of a stage."""
    replicas: int = 1
    """Pipelines with all layers, behind one head."""

    def grid(self, world_size: int) -> RankGrid:
        """How so many ranks divide: what tensor ranks and replicas leave are stages. Raises ConfigError."""
        each = self.tensor_parallel * self.replicas
        if world_size % each:
            sizes = f"{self.tensor_parallel} tensor ranks x {self.replicas} replicas"
            flag = "--tensor-parallel" if world_size % self.tensor_parallel else "--replicas"
            raise ConfigError(flag, f"{sizes} do not divide {world_size} ranks into stages")
        return RankGrid(self.tensor_parallel, self.replicas, world_size // each)


@dataclass(frozen=True, slots=True)
class DeviceSettings:
    """How GPUs compute."""

    batch_invariant: bool = False
    """Tokens do not depend on what else is computed, for some of the speed."""
    cuda_graphs: bool = True
    """Record decoding steps when serving begins."""
    devices: tuple[str, ...] | None = None
    """Device of each stage on this host; None = GPUs in turn, or the CPU."""


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Memory for keys and values, and who shares it."""

    block_size: int = 16
    """Tokens per KV block."""
    kv_cache_memory: int | None = None
    """Bytes per stage; None = from free memory."""
    kv_dtype: str = "auto"
    """`auto` is the model's."""
    prefix_cache: str = "per-key"
    """Whose requests share equal prefixes."""


@dataclass(frozen=True, slots=True)
class SchedulingSettings:
    """How many sequences run and wait, and what a step holds."""

    max_num_seqs: int = 256
    max_queue: int = 1024
    """Requests that may wait."""
    prefill_chunk: int | None = None
    """Prompt tokens per step."""
    speculate: int | None = None
    """Draft tokens per step and sequence; None = where they pay."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Listening addresses, their security, shutting down, and what is logged. A port of 0 means any free one."""

    host: str = "127.0.0.1"
    port: int = 50051
    metrics_port: int = 9400
    http_port: int = 8000
    cors_origin: tuple[str, ...] = ()
    """The origins whose pages may read HTTP answers; `*` = all."""
    chat_template: Path | None = None
    vllm_grpc: bool = False
    shutdown_timeout_s: float = 25.0
    start_timeout_s: float = 1800.0
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    api_key_file: Path | None = None
    trace: Path | None = None
    log_level: str = "info"
    """Lowest level that is logged, in all ranks. `log_format` holds for all ranks too."""
    log_format: str = "text"


@dataclass(frozen=True, slots=True)
class NetworkSettings:
    """How head and stages on several hosts find and trust each other."""

    secret_file: Path | None = None
    stage_tls_cert: Path | None = None
    """The three files of the control plane's TLS: all or none."""
    stage_tls_key: Path | None = None
    stage_tls_ca: Path | None = None
    stage_ports: tuple[int, int] | None = None
    """First and last on which stages listen, as far as that can be told."""
    control_port: int | None = None
    """The head's, for its stages; None = the one after MASTER_PORT."""
    interface: str | None = None
    """The name of a stage's interface for the other stages; None = found from its connection to the head."""
    advertise: str | None = None
    """A stage's address for the other stages; None = found like the interface."""


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """All parts. No two parts have a field of the same name."""

    model: ModelSettings = field(default_factory=ModelSettings)
    pipeline: PipelineSettings = field(default_factory=PipelineSettings)
    device: DeviceSettings = field(default_factory=DeviceSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    scheduling: SchedulingSettings = field(default_factory=SchedulingSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    network: NetworkSettings = field(default_factory=NetworkSettings)

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any]) -> ServeConfig:
        """Each flag goes into the part that has a field of its name, which may end with its unit."""
        parts: dict[str, Any] = {}
        for part in fields(cls):
            default = getattr(cls(), part.name)
            names = {field.name: field.name.removesuffix("_s") for field in fields(default)}
            own = {field: flags[name] for field, name in names.items() if name in flags}
            parts[part.name] = replace(default, **own)
        return cls(**parts)
