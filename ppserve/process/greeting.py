"""How a rank's processes connect to the head: both ends prove that they know the secret, without sending it.

Each side sends a random number that it has never used before, and answers the other's with a keyed hash of both.
A recorded answer fits no other connection, and the two sides' answers differ, so neither can be sent back.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time

from ppserve import wire
from ppserve.errors import UsageError, WireError
from ppserve.process import sockets
from ppserve.process.meeting import read_secret
from ppserve.process.tls import TlsConnection, stage_context

_RETRY_EVERY_S = 0.2
# The head answers within a turn of its engine.
_ANSWER_WITHIN_S = 10.0


def connect_to_head(meeting: wire.Meeting, rank: int, within_s: float) -> socket.socket:
    """A connection on which both ends have proved the secret. Tries again while the head is not there yet.

    Raises OSError after `within_s`, UsageError if the secrets differ.
    """
    until_s = time.monotonic() + within_s
    while True:
        try:
            return _connect(meeting, rank, max(_RETRY_EVERY_S, until_s - time.monotonic()))
        except (OSError, WireError) as error:
            if time.monotonic() > until_s:
                raise ConnectionError(f"{meeting.address}: {error}") from error
        time.sleep(_RETRY_EVERY_S)


def _connect(meeting: wire.Meeting, rank: int, timeout_s: float) -> socket.socket:
    # Read every time: a head that was started anew may have another secret.
    secret = read_secret(meeting)
    connection = sockets.connect(meeting.address, timeout_s)
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
    greeting = Greeting(secret, rank)
    while not greeting.is_done:
        if answer := greeting.heard(connection.recv(wire.MAX_GREETING_BYTES)):
            connection.sendall(answer)


class Greeting:
    """A rank's side of the handshake with the head, without the socket."""

    def __init__(self, secret: bytes, rank: int) -> None:
        self.is_done = False
        """Each side has proved that it knows the secret."""
        self._secret, self._rank = secret, rank
        self._reader = wire.FrameReader(wire.FromHead, wire.MAX_GREETING_BYTES)
        self._nonce = new_nonce()
        self._challenge: bytes | None = None

    def heard(self, received: bytes) -> bytes:
        """Returns the answer to these bytes. Raises OSError, WireError, and UsageError if retrying cannot help."""
        if not received:
            raise ConnectionError("the head ended the connection")
        match self._reader.feed(received):
            case []:
                return b""
            case [wire.Refused(reason, may_retry), *_]:
                raise ConnectionError(reason) if may_retry else UsageError(reason)
            case [wire.Challenge(challenge)] if self._challenge is None:
                self._challenge = challenge
                answer = rank_proof(self._secret, self._rank, challenge, self._nonce)
                return wire.encode(wire.Proof(self._rank, answer, self._nonce))
            case [wire.Welcome(answer)] if self._challenge is not None:
                expected = head_proof(self._secret, self._rank, self._challenge, self._nonce)
                if not hmac.compare_digest(answer, expected):
                    raise UsageError("the process at the head's address does not know this server's secret")
                self.is_done = True
                return b""
            case messages:
                raise WireError(f"{type(messages[0]).__name__} has no place in the greeting here")


def new_nonce() -> bytes:
    return secrets.token_bytes(32)


def rank_proof(secret: bytes, rank: int, challenge: bytes, nonce: bytes) -> bytes:
    """What a rank answers to the head's challenge. nonce: its own."""
    return _keyed_hash(secret, b"rank", rank, challenge, nonce)


def head_proof(secret: bytes, rank: int, challenge: bytes, nonce: bytes) -> bytes:
    """What the head answers to a rank's nonce."""
    return _keyed_hash(secret, b"head", rank, challenge, nonce)


def _keyed_hash(secret: bytes, side: bytes, rank: int, challenge: bytes, nonce: bytes) -> bytes:
    # With the length of what varies, no two different inputs make the same message.
    return hmac.digest(secret, b"ppserve %s %d %d " % (side, rank, len(challenge)) + challenge + nonce, "sha256")
