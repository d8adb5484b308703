"""How ranks find the head: its address, the shared secret, and the handshake that proves it.

Each rank finds the address and the secret by itself. On one host, the address is a Unix socket without a file,
whose name is made from the launcher's variables; both ends must belong to the same user. On several hosts, it is a
port of MASTER_ADDR, and the secret is in --secret-file. The launcher's store is not used, because everyone who can
reach it may read and write it.

In the handshake, each side sends a fresh random number, and answers the other's with a keyed hash of both. A
recorded answer is useless on another connection. The answers of the two sides differ, so neither can be sent back
as the other. The secret itself is never sent.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import socket
import sys
import time
from typing import Literal, TypeVar

from ppserve import wire
from ppserve.config import ServeConfig
from ppserve.errors import ConfigError, UsageError, WireError
from ppserve.process.environment import RankEnvironment, number_of
from ppserve.process.network import connect, listen
from ppserve.process.tls import TlsConnection, read_files, stage_context
from ppserve.wire import Meeting

T = TypeVar("T")

log = logging.getLogger("ppserve.control")

MIN_SECRET_BYTES = 16
_RETRY_EVERY_S = 0.2
# The head answers within a turn of its engine.
_ANSWER_WITHIN_S = 10.0


def find_meeting(config: ServeConfig, environment: RankEnvironment) -> Meeting:
    """Find the address and the secret; all ranks of a launcher find the same. Raises UsageError."""
    if environment.local_world_size == environment.world_size and sys.platform == "linux":
        # Only this launcher gives its ranks all of these values. The socket's name is valid in a network
        # namespace, as ports are.
        told = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
        digest = hashlib.sha256("\0".join(told).encode()).hexdigest()
        return Meeting(f"@ppserve-{os.getuid()}-{digest[:16]}", secret=digest[16:].encode())
    if not (host := os.environ.get("MASTER_ADDR")):
        raise UsageError("MASTER_ADDR is not set: start ranks on several hosts with torchrun")
    port = config.network.control_port or number_of("MASTER_PORT") + 1
    if config.network.secret_file is None:
        raise ConfigError("--secret-file", "stages on several hosts need one, the same on every host")
    tls = config.network if config.network.stage_tls_cert else None
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    secret = read_secret(Meeting(address, config.network.secret_file))
    held = read_files(tls) if tls is not None and sys.platform == "linux" else ()
    return Meeting(address, config.network.secret_file, secret, tls, held)


def open_meeting(meeting: Meeting) -> tuple[socket.socket, bytes]:
    """Open the head's socket. Return it and the secret. Raises UsageError."""
    secret = read_secret(meeting)
    try:
        return listen(meeting.address), secret
    except OSError as error:
        if meeting.secret_file is None:
            raise UsageError(f"another server listens on {meeting.address}: {error.strerror}") from None
        raise ConfigError("--control-port", f"cannot listen on {meeting.address}: {error.strerror}") from None


def read_secret(meeting: Meeting) -> bytes:
    """Return the secret. On several hosts it is read from the file each time, because a head that was started anew
    may have another one; if the file is gone, the secret of the start is returned. Raises ConfigError.

    On one host, the secret is made from values that the launcher gives only to its ranks. A program may guess
    these if the run's id is torchrun's default, but the kernel keeps other users away (`network.connect`).
    """
    path = meeting.secret_file
    if path is None:
        return meeting.secret
    try:
        secret = path.read_bytes().strip()
        problem = f"needs at least {MIN_SECRET_BYTES} characters" if len(secret) < MIN_SECRET_BYTES else ""
    except OSError as error:
        problem = str(error.strerror)
    if not problem:
        return secret
    if meeting.secret:
        log.warning("--secret-file: %s: %s; the secret of the start is used", path, problem)
        return meeting.secret
    raise ConfigError("--secret-file", f"{path}: {problem}")


# ---- the handshake ----


def connect_to_head(meeting: Meeting, rank: int, within_s: float) -> socket.socket:
    """Connect to the head, so that each side has proved to know the secret. Raises OSError after `within_s`, and
    UsageError if the head has another secret."""
    until_s = time.monotonic() + within_s
    was_warned = False
    while True:
        try:
            return _connect(meeting, rank, max(_RETRY_EVERY_S, until_s - time.monotonic()))
        except (OSError, WireError) as error:
            if time.monotonic() > until_s:
                raise ConnectionError(f"{meeting.address}: {error}") from error
            if not was_warned:
                log.warning("cannot reach the head at %s yet: %s", meeting.address, error)
            was_warned = True
        time.sleep(_RETRY_EVERY_S)


def _connect(meeting: Meeting, rank: int, timeout_s: float) -> socket.socket:
    secret = read_secret(meeting)
    connection = connect(meeting.address, timeout_s)
    try:
        connection.settimeout(_ANSWER_WITHIN_S)
        if meeting.tls is not None:
            context = stage_context(meeting.tls, serves=False, held=meeting.tls_held)
            connection = TlsConnection(connection, context, serves=False)
            connection.handshake()
        _greet(connection, secret, rank)
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


def _greet(connection: socket.socket, secret: bytes, rank: int) -> None:
    """Do a rank's part of the handshake. Raises OSError or WireError; UsageError if a retry does not help."""
    reader = wire.FrameReader(wire.FromHead, wire.MAX_GREETING_BYTES)
    nonce = new_nonce()
    challenge = _receive(connection, reader, wire.Challenge).nonce
    proof = make_proof("rank", secret, rank, challenge, nonce)
    connection.sendall(wire.encode(wire.Proof(rank, proof, nonce)))
    welcome = _receive(connection, reader, wire.Welcome)
    if not hmac.compare_digest(welcome.proof, make_proof("head", secret, rank, challenge, nonce)):
        raise UsageError("the process at the head's address does not know this server's secret")


def _receive(connection: socket.socket, reader: wire.FrameReader, kind: type[T]) -> T:
    messages: list[object] = []
    while not messages:
        received = connection.recv(wire.MAX_GREETING_BYTES)
        if not received:
            raise ConnectionError("the head ended the connection")
        messages = reader.feed(received)
    match messages:
        case [wire.Refused(reason, may_retry), *_]:
            raise ConnectionError(reason) if may_retry else UsageError(reason)
        case [message] if isinstance(message, kind):
            return message
    raise WireError(f"{type(messages[0]).__name__} has no place in the greeting here")


def new_nonce() -> bytes:
    """Return a fresh random number."""
    return secrets.token_bytes(32)


def make_proof(side: Literal["rank", "head"], secret: bytes, rank: int, challenge: bytes, nonce: bytes) -> bytes:
    """Return the proof with which one side answers the other side's random number."""
    # With the length, different inputs never make the same message.
    message = f"ppserve {side} {rank} {len(challenge)} ".encode() + challenge + nonce
    return hmac.digest(secret, message, "sha256")
