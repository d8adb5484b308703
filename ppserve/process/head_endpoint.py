"""Where ranks find the head: its address, and the secret by which both sides prove themselves (`handshake`).

Each rank finds the address and the secret by itself. On one host, the address is a Unix socket without a file,
whose name is made from the launcher's variables; both ends must belong to the same user. On several hosts, it is a
port of MASTER_ADDR, and the secret is in --secret-file. The launcher's store is not used, because everyone who can
reach it may read and write it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import sys
from pathlib import Path

from ppserve.config import ServeConfig
from ppserve.errors import ConfigError, UsageError
from ppserve.process.environment import RankEnvironment, number_of
from ppserve.process.network import listen
from ppserve.process.tls import read_files
from ppserve.wire import HeadEndpoint

log = logging.getLogger("ppserve.control")

MIN_SECRET_BYTES = 16


def find_head_endpoint(config: ServeConfig, environment: RankEnvironment) -> HeadEndpoint:
    """Find the address and the secret; all ranks of a launcher find the same. Raises UsageError."""
    if environment.local_world_size == environment.world_size and sys.platform == "linux":
        # Only this launcher gives its ranks all of these values. The socket's name is valid in a network
        # namespace, as ports are.
        told = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
        digest = hashlib.sha256("\0".join(told).encode()).hexdigest()
        return HeadEndpoint(f"@ppserve-{os.getuid()}-{digest[:16]}", secret=digest[16:].encode())
    if not (host := os.environ.get("MASTER_ADDR")):
        raise UsageError("MASTER_ADDR is not set: start ranks on several hosts with torchrun")
    port = config.network.control_port or number_of("MASTER_PORT") + 1
    if config.network.secret_file is None:
        raise ConfigError("--secret-file", "stages on several hosts need one, the same on every host")
    tls = config.network if config.network.stage_tls_cert else None
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    secret = read_secret(HeadEndpoint(address, config.network.secret_file))
    held = read_files(tls) if tls is not None and sys.platform == "linux" else ()
    return HeadEndpoint(address, config.network.secret_file, secret, tls, held)


def open_head_socket(endpoint: HeadEndpoint) -> tuple[socket.socket, bytes]:
    """Open the head's socket. Return it and the secret. Raises UsageError."""
    secret = read_secret(endpoint)
    try:
        return listen(endpoint.address), secret
    except OSError as error:
        if endpoint.secret_file is None:
            raise UsageError(f"another server listens on {endpoint.address}: {error.strerror}") from None
        raise ConfigError("--control-port", f"cannot listen on {endpoint.address}: {error.strerror}") from None


def check_secret_file(path: Path) -> None:
    """Raise ConfigError for a file that holds no secret."""
    read_secret(HeadEndpoint("", path))


def read_secret(endpoint: HeadEndpoint) -> bytes:
    """Return the secret. On several hosts it is read from the file each time, because a head that was started anew
    may have another one; if the file is gone, the secret of the start is returned. Raises ConfigError.

    On one host, the secret is made from values that the launcher gives only to its ranks. A program may guess
    these if the run's id is torchrun's default, but the kernel keeps other users away (`network.connect`).
    """
    path = endpoint.secret_file
    if path is None:
        return endpoint.secret
    try:
        secret = path.read_bytes().strip()
        problem = f"needs at least {MIN_SECRET_BYTES} characters" if len(secret) < MIN_SECRET_BYTES else ""
    except OSError as error:
        problem = str(error.strerror)
    if not problem:
        return secret
    if endpoint.secret:
        log.warning("--secret-file: %s: %s; the secret of the start is used", path, problem)
        return endpoint.secret
    raise ConfigError("--secret-file", f"{path}: {problem}")
