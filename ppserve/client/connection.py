"""Where the server is and how to prove who calls: what both clients need to open a channel."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc

CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    # Look again soon for a server that restarts; gRPC's own first pause is a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", 16 << 20),
]


C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Tls:
    """Speak TLS. ca: PEM file of the authority to trust, None for the system's. cert and key: PEM files that
    prove who calls, where the server asks for that."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises OSError when a file cannot be read."""
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.cert))


def open_channel(insecure: Callable[..., C], secure: Callable[..., C], target: str, tls: Tls | None) -> C:
    """A channel; `insecure` and `secure` are what gRPC, or its part for asyncio, makes one with."""
    if tls is None:
        return insecure(target, CHANNEL_OPTIONS)
    return secure(target, tls.credentials(), CHANNEL_OPTIONS)


def call_metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """What every call carries."""
    return () if api_key is None else (("authorization", f"Bearer {api_key}"),)


class TimeLimit:
    """Seconds that a call may take, over all its attempts; None: no limit."""

    def __init__(self, timeout_s: float | None) -> None:
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s

    @property
    def left_s(self) -> float | None:
        return None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())

    def pause(self, wanted_s: float) -> float:
        """`wanted_s` a little longer, by chance, so that clients who were cut off together come back apart;
        never beyond the limit."""
        chosen_s = wanted_s * random.uniform(1.0, 1.25)
        left_s = self.left_s
        return chosen_s if left_s is None else min(chosen_s, left_s)


def _read(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()
