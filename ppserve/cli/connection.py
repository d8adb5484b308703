"""The flags by which commands reach a server: address, key, TLS."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ppserve.client import Tls
from ppserve.errors import ConfigError
from ppserve.head.api.auth import read_keys

_SCHEMES = ("unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:", "vsock:")


def connection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the flags. None holds the key itself: every user of a machine sees the arguments of processes."""
    path = click.Path(path_type=Path)
    options = (
        click.option(
            "--target", default="127.0.0.1:50051", envvar="PPSERVE_TARGET", show_default=True, metavar="HOST:PORT",
            help="The server.",
        ),
        click.option("--api-key-file", type=path, help="Holds the key on its first line. Or set PPSERVE_API_KEY."),
        click.option("--tls", is_flag=True, help="Speak TLS, trusting the system's authorities."),
        click.option("--tls-ca", type=path, help="Speak TLS, trusting this authority."),
        click.option("--tls-cert", type=path, help="Certificate that proves who calls."),
        click.option("--tls-key", type=path, help="Its key."),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def connection(flags: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `Client` and `AsyncClient`. Raises ConfigError."""
    tls = None
    if flags["tls"] or flags["tls_ca"] or flags["tls_cert"]:
        tls = Tls(flags["tls_ca"], flags["tls_cert"], flags["tls_key"])
        try:
            tls.credentials()
        except OSError as error:
            raise ConfigError("--tls-ca", f"cannot read {error.filename}: {error.strerror}") from None
    target: str = flags["target"]
    host, _, port = target.rpartition(":")
    # gRPC's own schemes are its to judge. Of a port it takes the lowest 16 bits.
    is_port = len(port) < 6 and port.isdecimal() and 0 < int(port) < 1 << 16
    if not (host and is_port and "/" not in host) and not target.startswith(_SCHEMES):
        raise ConfigError("--target", f"{target!r} is not HOST:PORT")
    return {"target": target, "api_key": _api_key(flags["api_key_file"]), "tls": tls}


def _api_key(file: Path | None) -> str | None:
    if file is None:
        return _sendable(os.environ.get("PPSERVE_API_KEY") or None, "PPSERVE_API_KEY")
    _, key = read_keys(file)[0]
    return _sendable(key, "--api-key-file")


def _sendable(key: str | None, name: str) -> str | None:
    """The key, if gRPC's metadata can hold it. Raises ConfigError."""
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError(name, "the key may only have printable ASCII characters")
    return key
