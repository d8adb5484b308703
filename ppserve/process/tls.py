"""TLS of the control plane between hosts.

Each end shows a certificate of the same authority, which must sign only for the ranks of this server. Names are
not compared, because a rank may move to another host.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ppserve.config import NetworkSettings
from ppserve.errors import ConfigError

log = logging.getLogger("ppserve.control")

_CHUNK_BYTES = 1 << 16


def read_files(settings: NetworkSettings) -> tuple[bytes, ...]:
    """Return the contents of the files of authority, certificate and key. Raises ConfigError."""
    held = []
    for part, path in zip(("ca", "cert", "key"), _paths(settings), strict=True):
        try:
            held.append(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"--stage-tls-{part}", f"{path}: {error.strerror}") from error
    return tuple(held)


def stage_context(settings: NetworkSettings, *, serves: bool, held: Sequence[bytes] = ()) -> ssl.SSLContext:
    """Return the context of the control plane's TLS. Raises ConfigError for files that cannot be used.

    serves: whether it is for the head's side. held: the contents that the files had at the start; they are used if
    one of the files is gone.
    """
    paths = _paths(settings)
    gone = next((path for path in paths if not path.exists()), None)
    if gone is None or not held:
        return _context(*paths, serves=serves)
    log.warning("--stage-tls-*: %s is gone; what the three files held at the start is used", gone)
    with ExitStack() as stack:
        return _context(*(stack.enter_context(_in_memory(content)) for content in held), serves=serves)


def _paths(settings: NetworkSettings) -> tuple[Path, Path, Path]:
    authority, cert, key = settings.stage_tls_ca, settings.stage_tls_cert, settings.stage_tls_key
    assert authority is not None
    assert cert is not None
    assert key is not None
    return authority, cert, key


@contextmanager
def _in_memory(content: bytes) -> Iterator[Path]:
    """Yield the path of a file in memory that only this process can open, because `ssl` reads certificates and
    keys only from files."""
    with open(os.memfd_create("ppserve-tls"), "wb") as file:
        file.write(content)
        file.flush()
        yield Path(f"/proc/self/fd/{file.fileno()}")


def _context(authority: Path, cert: Path, key: Path, *, serves: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if serves else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    flag, path = "--stage-tls-ca", authority
    try:
        context.load_verify_locations(path)
        flag, path = "--stage-tls-cert", cert
        context.load_cert_chain(path, key, password=lambda: "")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, FileNotFoundError) else "not PEM, or not the certificate's key"
        raise ConfigError(flag, f"{path}: {why}") from error
    return context


class TlsConnection(socket.socket):
    """A connected socket whose bytes are encrypted. One thread may receive while another sends, and `recv` waits
    for bytes only once; `ssl.SSLSocket` promises neither.

    What the head sends before the handshake is complete is held back until it is.
    """

    def __init__(self, raw: socket.socket, context: ssl.SSLContext, *, serves: bool) -> None:
        timeout_s = raw.gettimeout()
        super().__init__(fileno=raw.detach())
        self.settimeout(timeout_s)
        self._serves = serves
        self._arrived = ssl.MemoryBIO()
        self._leaving = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arrived, self._leaving, server_side=serves)
        self._is_open = False
        self._early = b""
        self._lock = threading.Lock()  # guards everything above

    def handshake(self) -> None:
        """Complete the handshake. A stage calls this before anything else. Raises OSError, such as SSLError."""
        try:
            while not self._continue_handshake():
                super().sendall(self._leaving.read())
                if received := super().recv(_CHUNK_BYTES):
                    self._arrived.write(received)
                else:
                    self._arrived.write_eof()
        finally:
            super().sendall(self._leaving.read())  # if the handshake has failed, this tells the head why

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Receive decrypted bytes; they are empty at the end. While a record is incomplete, a stage waits; for the
        head, BlockingIOError is raised."""
        while received := super().recv(size, flags):
            with self._lock:
                self._arrived.write(received)
                text, has_ended = self._decrypt()
            if text or has_ended:
                return text
            if self._serves:
                raise BlockingIOError
        return b""

    def seal(self, frame: bytes) -> bytes:
        """Return the bytes to send now: those of the handshake and, once it is complete, the encrypted frame."""
        with self._lock:
            if self._is_open:
                self._encrypt(frame)
            else:
                self._early += frame
            return self._leaving.read()

    def sendall(self, frame: bytes, flags: int = 0) -> None:  # type: ignore[override]
        """Encrypt a frame and send it. One thread at a time may call this. Raises OSError."""
        super().sendall(self.seal(frame), flags)

    def _decrypt(self) -> tuple[bytes, bool]:
        """Return the decrypted bytes so far, and whether the other end has closed its side."""
        text = bytearray()
        if not self._is_open and not self._continue_handshake():
            return b"", False
        try:
            while chunk := self._tls.read(_CHUNK_BYTES):
                text += chunk
        except ssl.SSLWantReadError:
            return bytes(text), False
        return bytes(text), True

    def _continue_handshake(self) -> bool:
        """Do the next part of the handshake. Return whether it is complete."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        self._is_open = True
        self._encrypt(self._early)
        return True

    def _encrypt(self, frame: bytes) -> None:
        rest = memoryview(frame)
        while rest:
            rest = rest[self._tls.write(rest) :]
