"""What a request may ask for. Checked before any work is done for it, and told by GetModelInfo."""

from __future__ import annotations

from ctypes import c_float
from dataclasses import dataclass


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
    max_request_id_bytes: int = 128
    max_message_bytes: int = 512 << 10
    max_metadata_bytes: int = 16 << 10


# What the proto's integers hold.
MAX_COUNT = 2**32 - 1
MAX_SEED = 2**64 - 1
MAX_PRIORITY = 2**31 - 1
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
    "priority": (-MAX_PRIORITY - 1, MAX_PRIORITY),
}
"""Inclusive; by the field's name in the proto."""

# Priorities beyond these count as these. Ten seconds of waiting raise a request by one, so that no caller can hold
# up the others for more than minutes.
MOST_URGENT = 10
LEAST_URGENT = -10
