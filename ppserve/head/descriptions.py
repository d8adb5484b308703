"""What the engine says about itself: plain values, which each protocol turns into its own messages."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from ppserve.core.architecture import Architecture
from ppserve.core.figures import numbers
from ppserve.head.limits import Limits


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The model as served.

    dtype: resolved, never `auto`. max_context: tokens of prompt and output together. eos_id: None where the
    model has no end-of-text token. why_not: empty when `deterministic`. kernels: those of all stages, in words.
    kv_dtype: of keys and values.
    """

    name: str
    architecture: Architecture
    num_parameters: int
    dtype: str
    quantization: str
    max_context: int
    eos_id: int | None
    has_tokenizer: bool
    deterministic: bool
    why_not: str
    version: str
    limits: Limits = field(default_factory=Limits)
    kernels: str = ""
    kv_dtype: str = "float32"

    @property
    def numbers(self) -> str:
        """How numbers are kept, in words."""
        return numbers(self.dtype, self.quantization, self.kv_dtype)

    @property
    def fingerprint(self) -> str:
        """Where it is the same, so are the tokens and log-probabilities of the same request and seed."""
        kernels = hashlib.sha256(f"{self.numbers}, {self.kernels}".encode()).hexdigest()[:8]
        return f"{self.name}-{self.dtype}-{kernels}-ppserve-{self.version}"


@dataclass(frozen=True, slots=True)
class RankDescription:
    """One of the ranks that compute a stage together. gather_s: how long it has waited for the others."""

    rank: int
    tensor: int
    host: str
    device: str
    num_parameters: int
    gather_s: float = 0.0
    live: bool = True
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class StageDescription:
    """One stage: where it runs, what it holds, and where its time went (in seconds, since the head started).

    The step times are None until they were predicted or measured; `bubble_s` holds (cause, seconds). rank, host:
    of the first of its ranks.
    """

    stage: int
    rank: int
    host: str
    device: str
    first_layer: int
    num_layers: int
    layers: str
    num_parameters: int
    weight_bytes: int
    kv_bytes: int
    predicted_step_s: float | None = None
    measured_step_s: float | None = None
    busy_s: float = 0.0
    bubble_s: tuple[tuple[str, float], ...] = ()
    idle_s: float = 0.0
    live: bool = True
    restarts: int = 0
    replica: int = 0
    tensor: int = 0
    ranks: tuple[RankDescription, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadDescription:
    """How full all replicas together are.

    running: sequences that are computed, at most max_running. waiting: requests in the queue. kv_usage: share of
    the KV cache's kv_tokens that is held, 0 to 1.
    """

    running: int
    waiting: int
    max_running: int
    kv_tokens: int
    kv_usage: float


@dataclass(frozen=True, slots=True)
class ReplicaDescription:
    """One of the replicas. serves: all its stages are there. running: sequences. kv_usage: 0 to 1."""

    replica: int
    serves: bool
    epoch: int
    microbatches: int
    running: int = 0
    kv_usage: float = 0.0


@dataclass(frozen=True, slots=True)
class Topology:
    """The pipelines as they stand. stages: of all replicas, in their order. epoch: one more than how often any was
    lost. microbatches: of the first replica."""

    stages: tuple[StageDescription, ...]
    transport: str
    epoch: int
    microbatches: int
    advice: str = ""
    replicas: tuple[ReplicaDescription, ...] = ()
