"""TLS of the control plane between hosts.

Each end shows a certificate of one authority, which signs for the ranks of this server alone.
So names are not compared: a rank may move to another host.
"""

from __future__ import annotations

import socket
import ssl
import threading

from ppserve.config import NetworkSettings
from ppserve.errors import ConfigError

_PIECE = 1 << 16


def stage_context(settings: NetworkSettings, *, serves: bool) -> ssl.SSLContext:
    """serves: for the head. Raises ConfigError for files that cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if serves else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    flag = "--stage-tls-ca"
    path = settings.stage_tls_ca
    try:
        context.load_verify_locations(path)
        flag = "--stage-tls-cert"
        path = settings.stage_tls_cert
        assert path is not None
        context.load_cert_chain(path, settings.stage_tls_key, password=lambda: "")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, FileNotFoundError) else "not PEM, or not the certificate's key"
        raise ConfigError(flag, f"{path}: {why}") from error
    return context


class TlsConnection(socket.socket):
    """A connected socket whose bytes are encrypted. One thread may receive while another sends.
    `recv` waits for bytes once: `ssl.SSLSocket` promises neither.

    What the head sends before the handshake is complete leaves after it.
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
        self._lock = threading.Lock()  # of all above

    def handshake(self) -> None:
        """For a stage, before anything else. Raises OSError (SSLError is one)."""
        try:
            while not self._continue_handshake():
                super().sendall(self._leaving.read())
                if received := super().recv(_PIECE):
                    self._arrived.write(received)
                else:
                    self._arrived.write_eof()
        finally:
            super().sendall(self._leaving.read())  # where it failed, the head is told why

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Empty at the end. For a whole record, a stage waits, the head raises BlockingIOError."""
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
        """The bytes to send now: the handshake's and, once that is done, the frame."""
        with self._lock:
            if self._is_open:
                self._encrypt(frame)
            else:
                self._early += frame
            return self._leaving.read()

    def sendall(self, frame: bytes, flags: int = 0) -> None:  # type: ignore[override]
        """For one thread at a time. Raises OSError."""
        super().sendall(self.seal(frame), flags)

    def _decrypt(self) -> tuple[bytes, bool]:
        """All decrypted bytes, and whether the other end has closed its side."""
        text = bytearray()
        if not self._is_open and not self._continue_handshake():
            return b"", False
        try:
            while piece := self._tls.read(_PIECE):
                text += piece
        except ssl.SSLWantReadError:
            return bytes(text), False
        return bytes(text), True

    def _continue_handshake(self) -> bool:
        """Whether the handshake is complete."""
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
