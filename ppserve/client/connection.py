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
_LONGEST_S = 1e9  # gRPC treats much longer time limits as if they had passed
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
    """File of the authority to trust; None = the system's authorities."""
    cert: Path | str | None = None
    """File of the client's own certificate, for servers that ask for one."""
    key: Path | str | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError("a certificate and its key are needed together")

    def credentials(self) -> grpc.ChannelCredentials:
        """Return gRPC's form of these files. Raises OSError when a file cannot be read."""
        paths = (self.ca, self.key, self.cert)
        return grpc.ssl_channel_credentials(*(None if path is None else Path(path).read_bytes() for path in paths))


def open_channel(library: Any, target: str, tls: Tls | None) -> Any:
    """Open a channel of the library, grpc or grpc.aio. A proxy that the environment names is used, except for this
    host, which a proxy could not reach, and for hosts that `no_proxy` names. Raises ValueError for an address of
    HTTP, and OSError for a bad file."""
    if re.match("https?://", target):
        raise ValueError(f"target: {target!r} is not HOST:PORT of the gRPC port, such as localhost:50051")
    options = [*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", int(not is_this_host(target)))]
    if tls is None:
        return library.insecure_channel(target, options)
    return library.secure_channel(target, tls.credentials(), options)


def host_of(target: str) -> str:
    """Return the host of a target; empty for others than HOST:PORT, perhaps after `dns:`, `ipv4:` or `ipv6:`."""
    found = _TARGET.fullmatch(target)
    return found["six"] or found["host"] if found else ""


def is_this_host(target: str) -> bool:
    """Return whether the host of `target` is a loopback address or name."""
    host = host_of(target).lower().rstrip(".")
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host.partition("%")[0])
        address = getattr(address, "ipv4_mapped", None) or address
        return address.is_loopback or address.is_unspecified
    return host in _LOOPBACK_NAMES or host.endswith(".localhost")


def refuse_other_kinds(**given: tuple[object, type]) -> None:
    """Raise TypeError for an argument that is neither None nor of its type."""
    for name, (what, kind) in given.items():
        if what is not None and not isinstance(what, kind):
            raise TypeError(f"{name}: {reprlib.repr(what)} is not a {kind.__name__}")


def call_metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """Return the metadata of every call. Raises ValueError for a key that gRPC cannot send."""
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ValueError("api_key: it may only have printable ASCII characters")
    return () if api_key is None else (("authorization", f"Bearer {api_key}"),)


class TimeLimit:
    """The deadline of a call, which covers all its attempts. A timeout_s of None means that there is none."""

    def __init__(self, timeout_s: float | None) -> None:
        self._deadline_s = None if timeout_s is None else time.monotonic() + min(timeout_s, _LONGEST_S)

    @property
    def left_s(self) -> float | None:
        if self._deadline_s is None:
            return None
        return max(0.0, self._deadline_s - time.monotonic())

    def pause(self, wanted_s: float) -> float:
        """Return `wanted_s` plus a random part of up to 25%, so that clients spread out; at most the time left."""
        left_s = self.left_s
        return min(wanted_s * random.uniform(1.0, 1.25), math.inf if left_s is None else left_s)
