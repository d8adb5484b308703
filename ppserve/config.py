"""The operator's configuration. `cli` parses it once; it is frozen; each room is given the part that it needs.

Sizes are in bytes, times in seconds. None means `auto`: the value is decided at start-up or while serving.
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
QUANTIZATIONS = ("auto", "none", "int8", "int4")
KV_DTYPES = ("auto", "float32", "bfloat16", "int8")
TRANSPORTS = ("auto", "nccl", "gloo", "shm", "local")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which weights are served, and in which precision."""

    path: str = "tiny"
    """The model: `tiny`, a directory, a file or a hub id."""
    dtype: str = "auto"
    quantization: str = "auto"
    """The type of the weights of linear layers and LM head. `auto`: the file's own, if CPUs compute and `dtype` is
    `auto` too; else `none`."""
    force_cpu: bool = False
    served_model_name: tuple[str, ...] = ()
    """The names that callers may use for the model; answers have the first. If there are none, the name is the hub
    id or the last part of `path`."""
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """How the model is cut, and how stages exchange hidden states."""

    layers: Split | None = None
    """The layers of each stage; None: stages are balanced."""
    microbatches: int | None = None
    """How many steps may be in flight; None: that is chosen while serving."""
    transport: str = "auto"
    threads: int | None = None
    """How many threads compute in each stage; None: the host's cores are divided evenly among its stages."""
    tensor_parallel: int = 1
    """How many ranks share the layers of a stage."""
    replicas: int = 1
    """How many pipelines, each with all layers, are behind one head."""

    def grid(self, world_size: int) -> RankGrid:
        """Return how `world_size` ranks divide into tensor ranks, replicas and stages. Raises ConfigError if they
        do not."""
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
    """Whether tokens do not depend on what else is computed. It costs speed."""
    cuda_graphs: bool = True
    """Whether decoding steps are recorded as CUDA graphs when serving begins."""
    devices: tuple[str, ...] | None = None
    """The device of each stage on this host; None: its GPUs in turn, or the CPU if it has none."""


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Memory for keys and values, and which callers share prefixes in it."""

    block_size: int = 16
    """How many positions a KV block has."""
    kv_cache_memory: int | None = None
    """The bytes of each stage's cache; None: a share of the free memory."""
    kv_dtype: str = "auto"
    """The type of keys and values. `auto`: the same as `dtype`, or for quantized models the checkpoint's own."""
    prefix_cache: str = "per-key"
    """Which callers share cached prefixes. `shared`: all; `per-key`: those with the same API key; `off`: none."""


@dataclass(frozen=True, slots=True)
class SchedulingSettings:
    """How many sequences run and wait, and what a step has."""

    max_num_seqs: int = 256
    max_queue: int = 1024
    """How many requests may wait. Further ones are refused."""
    prefill_chunk: int | None = None
    """How many prompt tokens a step may have; None: that is decided for each step."""
    speculate: int | None = None
    """How many draft tokens each sequence has in a step; None: as many as raise the speed."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The addresses to listen on, their security, shutdown and logs. Port 0 means any free port."""

    host: str = "127.0.0.1"
    port: int = 50051
    metrics_port: int = 9400
    http_port: int = 8000
    cors_origin: tuple[str, ...] = ()
    """The origins whose pages may read HTTP answers; `*`: all."""
    no_page: bool = False
    """Whether HTTP shows no page at its root."""
    chat_template: Path | None = None
    max_logprobs: int = 20
    """How many of the most likely tokens a request may ask for with each token; -1: as many as the vocabulary
    has."""
    tool_format: str = "auto"
    """The format of calls of tools in answers. `auto`: the one that the chat template shows."""
    reasoning_format: str = "auto"
    vllm_grpc: bool = False
    shutdown_timeout_s: float = 25.0
    start_timeout_s: float = 1800.0
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    api_key_file: Path | None = None
    trace: Path | None = None
    log_level: str = "info"
    """The lowest level that is logged. This and `log_format` apply to all ranks."""
    log_format: str = "text"


@dataclass(frozen=True, slots=True)
class NetworkSettings:
    """How head and stages on several hosts find and trust each other."""

    secret_file: Path | None = None
    stage_tls_cert: Path | None = None
    """The certificate, key and authority for the control plane's TLS. All three are set, or none is."""
    stage_tls_key: Path | None = None
    stage_tls_ca: Path | None = None
    stage_ports: tuple[int, int] | None = None
    """The first and the last port for the stages' rendezvous stores. gloo and NCCL choose their own ports."""
    control_port: int | None = None
    """The head's port to which stages connect; None: MASTER_PORT + 1."""
    interface: str | None = None
    """The interface by which a stage reaches other stages; None: the one of its connection to the head."""
    advertise: str | None = None
    """The address to which other stages connect; None: the interface's."""


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """All parts of the configuration. No two parts have a field of the same name."""

    model: ModelSettings = field(default_factory=ModelSettings)
    pipeline: PipelineSettings = field(default_factory=PipelineSettings)
    device: DeviceSettings = field(default_factory=DeviceSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    scheduling: SchedulingSettings = field(default_factory=SchedulingSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    network: NetworkSettings = field(default_factory=NetworkSettings)

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any]) -> ServeConfig:
        """Put each flag into the part that has a field with its name. The field's name may end with `_s` for
        seconds."""
        parts: dict[str, Any] = {}
        for part in fields(cls):
            default = getattr(cls(), part.name)
            names = {field.name: field.name.removesuffix("_s") for field in fields(default)}
            own = {field: flags[name] for field, name in names.items() if name in flags}
            parts[part.name] = replace(default, **own)
        return cls(**parts)
