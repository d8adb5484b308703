"""Opens channels: address, TLS, keys, and the time limit of a call."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import random
import re
import reprlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

_TARGET = re.compile(r"(?:dns:(?://[^/]*/)?|ipv[46]:)?(?:\[(?P<six>[^]]*)\]|(?P<host>[^:/]*))(?::\w*)?")
_LOOPBACK_NAMES = ("localhost", "localhost4", "localhost6", "localhost.localdomain")
_LONGEST_S = 1e9  # gRPC takes much longer limits for past ones
CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    # Reconnect soon to a server that restarts; gRPC's first pause is a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", 16 << 20),
]


@dataclass(frozen=True, slots=True)
class Tls:
    """The PEM files of an encrypted connection."""

    ca: Path | str | None = None
    """File of the authority to trust; None: the system's."""
    cert: Path | str | None = None
    """File of the client's own certificate, for servers that ask for one."""
    key: Path | str | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError("a certificate and its key are needed together")

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises OSError when a file cannot be read."""
        paths = (self.ca, self.key, self.cert)
        return grpc.ssl_channel_credentials(*(None if path is None else Path(path).read_bytes() for path in paths))


def open_channel(library: Any, target: str, tls: Tls | None) -> Any:
    """A channel of the library: grpc, or grpc.aio. It goes through a proxy that the environment names, but not to
    this host, which a proxy could not reach, nor to one that `no_proxy` names."""
    options = [*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", int(not is_this_host(target)))]
    if tls is None:
        return library.insecure_channel(target, options)
    return library.secure_channel(target, tls.credentials(), options)


def is_this_host(target: str) -> bool:
    """Whether HOST:PORT, or gRPC's `dns:`, `ipv4:` or `ipv6:` before it, is a loopback address or name."""
    found = _TARGET.fullmatch(target)
    host = (found["six"] or found["host"]).lower().rstrip(".") if found else ""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host.partition("%")[0])
        address = getattr(address, "ipv4_mapped", None) or address
        return address.is_loopback or address.is_unspecified
    return host in _LOOPBACK_NAMES or host.endswith(".localhost")


def refuse_other_kinds(**given: tuple[object, type]) -> None:
    """Raises TypeError for an argument of another kind, unless it is None."""
    for name, (what, kind) in given.items():
        if what is not None and not isinstance(what, kind):
            raise TypeError(f"{name}: {reprlib.repr(what)} is not a {kind.__name__}")


def call_metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """Raises ValueError for a key that gRPC could not send."""
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ValueError("api_key: it may only have printable ASCII characters")
    return () if api_key is None else (("authorization", f"Bearer {api_key}"),)


class TimeLimit:
    """The deadline of a call over all its attempts. timeout_s None: no deadline."""

    def __init__(self, timeout_s: float | None) -> None:
        self._deadline_s = None if timeout_s is None else time.monotonic() + min(timeout_s, _LONGEST_S)

    @property
    def left_s(self) -> float | None:
        if self._deadline_s is None:
            return None
        return max(0.0, self._deadline_s - time.monotonic())

    def pause(self, wanted_s: float) -> float:
        """`wanted_s` and up to 25% more, not all at once; never beyond the deadline."""
        left_s = self.left_s
        return min(wanted_s * random.uniform(1.0, 1.25), math.inf if left_s is None else left_s)
