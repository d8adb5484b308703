"""Where ranks meet the head: its address, the shared secret, and the handshake that proves it.

Each rank finds address and secret by itself. On one host: a Unix socket and a file, in a directory of this user
that is named for the launcher. On several hosts: a port of MASTER_ADDR, and --secret-file.
Not by the launcher's store: everyone who can reach it may read and write it.

In the handshake each side sends a fresh random number, and answers the other's with a keyed hash of both.
A recorded answer fits no other connection. The two sides' answers differ, so neither can be sent back.
The secret is never sent.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import shutil
import socket
import stat
import tempfile
import time
from pathlib import Path
from typing import Literal, TypeVar

from ppserve import wire
from ppserve.config import ServeConfig
from ppserve.errors import ConfigError, UsageError, WireError
from ppserve.process.environment import RankEnvironment, number_of
from ppserve.process.network import connect, listen
from ppserve.process.tls import TlsConnection, stage_context
from ppserve.wire import Meeting

T = TypeVar("T")

MIN_SECRET_BYTES = 16
# Some systems allow a Unix socket's path 103 bytes; directory and name take 45.
_MAX_PLACE_BYTES = 58
_RETRY_EVERY_S = 0.2
# The head answers within a turn of its engine.
_ANSWER_WITHIN_S = 10.0


def find_meeting(config: ServeConfig, environment: RankEnvironment) -> Meeting:
    """The same for all ranks of a launcher. Raises UsageError."""
    if environment.local_world_size == environment.world_size:
        directory = _directory_of_launcher()
        return Meeting(str(directory / "head"), directory / "secret", is_ours=True)
    if not (host := os.environ.get("MASTER_ADDR")):
        raise UsageError("MASTER_ADDR is not set: start ranks on several hosts with torchrun")
    port = config.network.control_port or number_of("MASTER_PORT") + 1
    if config.network.secret_file is None:
        raise ConfigError("--secret-file", "stages on several hosts need one, the same on every host")
    tls = config.network if config.network.stage_tls_cert else None
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return Meeting(address, config.network.secret_file, is_ours=False, tls=tls)


def open_meeting(meeting: Meeting) -> tuple[socket.socket, bytes]:
    """Opens the head's socket; returns it with the secret, which is new on one host. Raises UsageError.
    A killed head's files are removed first, so that no rank brings an old secret."""
    if meeting.is_ours:
        _take_over(meeting)
    try:
        listener = listen(meeting.address)
    except OSError as error:
        raise ConfigError("--control-port", f"cannot listen on {meeting.address}: {error.strerror}") from None
    if meeting.is_ours:
        draft = meeting.secret_file.with_suffix(".draft")
        draft.touch(0o600)
        draft.write_text(secrets.token_hex(32))
        draft.rename(meeting.secret_file)
    return listener, read_secret(meeting)


def _take_over(meeting: Meeting) -> None:
    directory = meeting.secret_file.parent
    with contextlib.suppress(FileExistsError):
        directory.mkdir(0o700)
    _check_private(directory)
    with contextlib.suppress(OSError), connect(meeting.address, timeout_s=1.0):
        raise UsageError(f"another server listens on {meeting.address}")
    meeting.secret_file.unlink(missing_ok=True)


def close_meeting(meeting: Meeting) -> None:
    """Removes the head's files."""
    if meeting.is_ours:
        shutil.rmtree(meeting.secret_file.parent, ignore_errors=True)


def read_secret(meeting: Meeting) -> bytes:
    """Raises UsageError, and FileNotFoundError while the head has not begun."""
    path = meeting.secret_file
    if meeting.is_ours:
        _check_private(path.parent)
        return path.read_bytes()
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError("--secret-file", f"{path}: {error.strerror}") from None
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError("--secret-file", f"{path}: needs at least {MIN_SECRET_BYTES} characters")
    return secret


def _directory_of_launcher() -> Path:
    """Named for what only this launcher tells its ranks in this network namespace."""
    told = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
    with contextlib.suppress(OSError):  # only Linux has network namespaces
        told.append(os.readlink("/proc/self/ns/net"))
    name = hashlib.sha256("\0".join(told).encode()).hexdigest()[:16]
    places = os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir()
    fits = [place for place in places if os.access(place, os.W_OK) and len(os.fsencode(place)) <= _MAX_PLACE_BYTES]
    return Path(fits[0] if fits else "/tmp", f"ppserve-{os.getuid()}-{name}").absolute()


def _check_private(directory: Path) -> None:
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UsageError(f"{directory} must be a directory that this user alone can open")


# ---- the handshake ----


def connect_to_head(meeting: Meeting, rank: int, within_s: float) -> socket.socket:
    """A proved connection. Raises OSError after `within_s`, UsageError for other secrets."""
    until_s = time.monotonic() + within_s
    while True:
        try:
            return _connect(meeting, rank, max(_RETRY_EVERY_S, until_s - time.monotonic()))
        except (OSError, WireError) as error:
            if time.monotonic() > until_s:
                raise ConnectionError(f"{meeting.address}: {error}") from error
        time.sleep(_RETRY_EVERY_S)


def _connect(meeting: Meeting, rank: int, timeout_s: float) -> socket.socket:
    # Every time: a head that was started anew may have another.
    secret = read_secret(meeting)
    connection = connect(meeting.address, timeout_s)
    try:
        connection.settimeout(_ANSWER_WITHIN_S)
        if meeting.tls is not None:
            connection = TlsConnection(connection, stage_context(meeting.tls, serves=False), serves=False)
            connection.handshake()
        _greet(connection, secret, rank)
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


def _greet(connection: socket.socket, secret: bytes, rank: int) -> None:
    """A rank's side. Raises OSError, WireError; UsageError if no retry helps."""
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
    return secrets.token_bytes(32)


def make_proof(side: Literal["rank", "head"], secret: bytes, rank: int, challenge: bytes, nonce: bytes) -> bytes:
    """This side's answer to the other's number: the challenge, or the nonce."""
    # Lengths keep the messages of different inputs apart.
    message = f"ppserve {side} {rank} {len(challenge)} ".encode() + challenge + nonce
    return hmac.digest(secret, message, "sha256")
