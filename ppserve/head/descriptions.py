"""What the server says about itself and its limits: plain values, which each protocol turns into its messages."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from ctypes import c_float
from dataclasses import dataclass, field

from ppserve.core.architecture import Architecture
from ppserve.core.figures import numbers
from ppserve.head.engine.replica import ReplicaReading

MAX_REQUEST_ID_BYTES = 128


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds, inclusive. Bytes are of UTF-8.

    max_message_bytes and max_metadata_bytes are enforced by gRPC before anything is parsed; a message leaves room
    for a prompt of max_prompt_bytes beside everything else a request may hold.
    """

    max_prompt_bytes: int = 128 << 10
    max_n: int = 16
    max_stop: int = 32
    max_stop_bytes: int = 256
    max_stop_token_ids: int = 64
    max_logprobs: int = 20
    max_logit_bias: int = 1024
    max_request_id_bytes: int = MAX_REQUEST_ID_BYTES
    max_message_bytes: int = 512 << 10
    max_metadata_bytes: int = 16 << 10


# What the proto's integers hold.
MAX_COUNT = 2**32 - 1
MAX_SEED = 2**64 - 1
# Within these, arithmetic on logits stays finite. The temperature is 0 or in its range.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-4, 100.0
MAX_BIAS = 100.0
RANGES: dict[str, tuple[float, float]] = {
    "sampling.top_k": (0, MAX_COUNT),
    "sampling.min_p": (0, 1),
    # Logits divided by less may leave the range of float32. Rounded as the values are.
    "sampling.repetition_penalty": (c_float(0.01).value, 10),
    "sampling.frequency_penalty": (-10, 10),
    "sampling.presence_penalty": (-10, 10),
    "sampling.seed": (0, MAX_SEED),
    "stop.min_tokens": (0, MAX_COUNT),
    "stop.max_tokens": (0, MAX_COUNT),
    "output.stream_interval": (1, MAX_COUNT),
}
"""Inclusive; by the field's name in the proto."""

# Priorities beyond these count as these. Ten seconds of waiting raise a request by one, so that no caller can hold
# up the others for more than minutes.
MOST_URGENT = 10
LEAST_URGENT = -10


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The model as served."""

    name: str
    architecture: Architecture
    num_parameters: int
    dtype: str  # resolved, never `auto`
    quantization: str
    max_context: int  # tokens of prompt and output together
    eos_id: int | None  # None where the model has no end-of-text token
    has_tokenizer: bool
    deterministic: bool
    why_not: str  # empty when `deterministic`
    version: str
    limits: Limits = field(default_factory=Limits)
    kernels: str = ""  # those of all stages, in words
    kv_dtype: str = "float32"  # of keys and values

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
    """One of the ranks that compute a stage together."""

    rank: int
    tensor: int
    host: str
    device: str
    num_parameters: int
    gather_s: float = 0.0  # how long it has waited for the others
    live: bool = True
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class StageDescription:
    """One stage: where it runs, what it holds, and where its time went since the head started."""

    stage: int
    rank: int  # the first of its ranks; so is `host`
    host: str
    device: str
    first_layer: int
    num_layers: int
    layers: str
    num_parameters: int
    weight_bytes: int
    kv_bytes: int
    predicted_step_s: float | None = None  # None where it was not predicted
    measured_step_s: float | None = None  # None before the first step
    busy_s: float = 0.0
    bubble_s: Mapping[str, float] = field(default_factory=dict)  # by cause
    idle_s: float = 0.0
    live: bool = True
    restarts: int = 0
    replica: int = 0
    steps: int = 0  # computed
    ranks: tuple[RankDescription, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadDescription:
    """How full all replicas together are."""

    running: int  # sequences that are computed
    waiting: int  # requests in the queue
    max_running: int
    kv_tokens: int  # that the KV cache can hold
    kv_usage: float  # share of them that is held, 0 to 1


@dataclass(frozen=True, slots=True)
class Topology:
    """The pipelines as they stand."""

    stages: tuple[StageDescription, ...]  # of all replicas, in their order
    transport: str
    epoch: int  # one more than how often any replica was lost
    microbatches: int  # of the first replica
    advice: str = ""
    replicas: tuple[ReplicaReading, ...] = ()
