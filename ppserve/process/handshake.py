"""The handshake with which a rank joins the head: each side proves that it knows the secret.

Each side sends a fresh random number, and answers the other's with a keyed hash of both. A recorded answer is
useless on another connection. The answers of the two sides differ, so neither can be sent back as the other. The
secret itself is never sent. The head's side is `head.engine.handshake`.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import time
from typing import Literal, TypeVar

from ppserve import wire
from ppserve.errors import UsageError, WireError
from ppserve.process.head_endpoint import read_secret
from ppserve.process.network import connect
from ppserve.process.tls import TlsConnection, stage_context

T = TypeVar("T")

log = logging.getLogger("ppserve.control")

_RETRY_EVERY_S = 0.2
# The head answers within a turn of its engine.
_ANSWER_WITHIN_S = 10.0


def connect_to_head(endpoint: wire.HeadEndpoint, rank: int, within_s: float) -> socket.socket:
    """Connect to the head, so that each side has proved to know the secret. Raises OSError after `within_s`, and
    UsageError if the head has another secret."""
    until_s = time.monotonic() + within_s
    was_warned = False
    while True:
        try:
            return _connect(endpoint, rank, max(_RETRY_EVERY_S, until_s - time.monotonic()))
        except (OSError, WireError) as error:
            if time.monotonic() > until_s:
                raise ConnectionError(f"{endpoint.address}: {error}") from error
            if not was_warned:
                log.warning("cannot reach the head at %s yet: %s", endpoint.address, error)
            was_warned = True
        time.sleep(_RETRY_EVERY_S)


def _connect(endpoint: wire.HeadEndpoint, rank: int, timeout_s: float) -> socket.socket:
    secret = read_secret(endpoint)
    connection = connect(endpoint.address, timeout_s)
    try:
        connection.settimeout(_ANSWER_WITHIN_S)
        if endpoint.tls is not None:
            context = stage_context(endpoint.tls, serves=False, held=endpoint.tls_held)
            connection = TlsConnection(connection, context, serves=False)
            connection.handshake()
        _prove(connection, secret, rank)
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


def _prove(connection: socket.socket, secret: bytes, rank: int) -> None:
    """Do a rank's part of the handshake. Raises OSError or WireError; UsageError if a retry does not help."""
    reader = wire.FrameReader(wire.FromHead, wire.MAX_HANDSHAKE_BYTES)
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
        received = connection.recv(wire.MAX_HANDSHAKE_BYTES)
        if not received:
            raise ConnectionError("the head ended the connection")
        messages = reader.feed(received)
    match messages:
        case [wire.Refused(reason, may_retry), *_]:
            raise ConnectionError(reason) if may_retry else UsageError(reason)
        case [message] if isinstance(message, kind):
            return message
    raise WireError(f"{type(messages[0]).__name__} has no place in the handshake here")


def new_nonce() -> bytes:
    """Return a fresh random number."""
    return secrets.token_bytes(32)


def make_proof(side: Literal["rank", "head"], secret: bytes, rank: int, challenge: bytes, nonce: bytes) -> bytes:
    """Return the proof with which one side answers the other side's random number."""
    # With the length, different inputs never make the same message.
    message = f"ppserve {side} {rank} {len(challenge)} ".encode() + challenge + nonce
    return hmac.digest(secret, message, "sha256")
