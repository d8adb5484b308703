"""Where the head listens, and the secret that it shares with all ranks. Each rank finds both by itself.

On one host: a Unix socket and a file, in a directory of this user alone that is named for the launcher.
On several hosts: a port of MASTER_ADDR, and --secret-file.
The launcher's store is not used: everyone who can reach it may read and write it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import socket
import stat
import tempfile
from pathlib import Path

from ppserve.config import NetworkSettings, ServeConfig
from ppserve.errors import ConfigError, UsageError
from ppserve.process import sockets
from ppserve.process.environment import RankEnvironment, number_of
from ppserve.wire import Meeting, StageTls, TcpAddress, UnixAddress

MIN_SECRET_BYTES = 16
# A Unix socket's path may have 103 bytes on some systems. Directory and name within take 45 of them.
_MAX_PLACE_BYTES = 58


def find_meeting(config: ServeConfig, environment: RankEnvironment) -> Meeting:
    """The same for all ranks of one launcher. Raises UsageError."""
    if environment.local_world_size == environment.world_size:
        directory = _directory_of_launcher()
        return Meeting(UnixAddress(str(directory / "head")), directory / "secret", is_ours=True)
    host = os.environ.get("MASTER_ADDR")
    if not host:
        raise UsageError("MASTER_ADDR is not set: start ranks on several hosts with torchrun")
    port = config.network.control_port or number_of("MASTER_PORT") + 1
    if config.network.secret_file is None:
        raise ConfigError("--secret-file", "stages on several hosts need one, the same on every host")
    tls = _stage_tls(config.network)
    return Meeting(TcpAddress(host, port), config.network.secret_file, is_ours=False, tls=tls)


def begin(meeting: Meeting) -> tuple[socket.socket, bytes]:
    """Opens the head's socket; returns it with the secret. Raises UsageError.

    On one host it makes a new secret. A killed head's files are removed before it listens, so that no rank takes
    an old secret to a new head.
    """
    place = meeting.secret_file.parent
    if meeting.is_ours:
        for directory in (place.parent, place):
            with contextlib.suppress(FileExistsError):
                directory.mkdir(0o700)
            _check_private(directory)
        if sockets.answers(meeting.address):
            raise UsageError(f"another server listens on {meeting.address}")
        meeting.secret_file.unlink(missing_ok=True)
    try:
        listener = sockets.listen(meeting.address)
    except OSError as error:
        raise ConfigError("--control-port", f"cannot listen on {meeting.address}: {error.strerror}") from None
    if meeting.is_ours:
        draft = meeting.secret_file.with_suffix(".draft")
        draft.touch(0o600)
        draft.write_text(secrets.token_hex(32))
        draft.rename(meeting.secret_file)
    return listener, read_secret(meeting)


def end(meeting: Meeting) -> None:
    """Removes the head's files."""
    if meeting.is_ours:
        shutil.rmtree(meeting.secret_file.parent, ignore_errors=True)


def read_secret(meeting: Meeting) -> bytes:
    """Raises UsageError, and FileNotFoundError while the head has not begun."""
    path = meeting.secret_file
    if meeting.is_ours:
        for directory in (path.parent.parent, path.parent):
            _check_private(directory)
        return path.read_bytes()
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError("--secret-file", f"{path}: {error.strerror}") from None
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError("--secret-file", f"{path}: needs at least {MIN_SECRET_BYTES} characters")
    return secret


def _stage_tls(network: NetworkSettings) -> StageTls | None:
    cert, key, ca = network.stage_tls_cert, network.stage_tls_key, network.stage_tls_ca
    return StageTls(cert, key, ca) if cert and key and ca else None


def _directory_of_launcher() -> Path:
    """Named for what only this launcher tells its ranks in this network namespace."""
    told = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
    with contextlib.suppress(OSError):  # only Linux has network namespaces
        told.append(os.readlink("/proc/self/ns/net"))
    name = hashlib.sha256("\0".join(told).encode()).hexdigest()[:16]
    return _place_for_sockets() / f"ppserve-{os.getuid()}" / name


def _place_for_sockets() -> Path:
    for name in (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir()):
        if os.access(name, os.W_OK) and len(os.fsencode(name)) <= _MAX_PLACE_BYTES:
            return Path(name)
    return Path("/tmp")


def _check_private(directory: Path) -> None:
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UsageError(f"{directory} must be a directory that this user alone can open")
