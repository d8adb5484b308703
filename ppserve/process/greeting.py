"""How a rank's processes connect to the head: both ends prove the secret before anything else is said."""

from __future__ import annotations

import socket
import time
from typing import Any

from ppserve import wire
from ppserve.errors import UsageError, WireError
from ppserve.process import proof, sockets
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
        time.sleep(_RETRY_EVERY_S)  # nothing tells when a head begins to listen


def _connect(meeting: wire.Meeting, rank: int, timeout_s: float) -> socket.socket:
    # Read every time: a head that was started anew may have another secret.
    secret = read_secret(meeting)
    connection = sockets.connect(meeting.address, timeout_s)
    try:
        connection.settimeout(_ANSWER_WITHIN_S)
        if meeting.tls is not None:
            connection = TlsConnection(connection, stage_context(meeting.tls, serves=False), serves=False)
        _greet(connection, secret, rank)
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


def _greet(connection: socket.socket, secret: bytes, rank: int) -> None:
    reader = wire.FrameReader(wire.FromHead, wire.MAX_GREETING_BYTES)
    challenge, nonce = _hear(connection, reader, wire.Challenge).nonce, proof.new_nonce()
    answer = proof.rank_proof(secret, rank, challenge, nonce)
    connection.sendall(wire.encode(wire.Proof(rank, answer, nonce)))
    welcome = _hear(connection, reader, wire.Welcome)
    if not proof.is_same(welcome.proof, proof.head_proof(secret, rank, challenge, nonce)):
        raise UsageError("who listens in the place of the head does not know this server's secret")


def _hear(connection: socket.socket, reader: wire.FrameReader, kind: type[Any]) -> Any:
    """The next message. Raises OSError, WireError, UsageError if it is a refusal for good."""
    messages: list[Any] = []
    while not messages:
        received = connection.recv(wire.MAX_GREETING_BYTES)
        if not received:
            raise ConnectionError("the head ended the connection")
        messages = reader.feed(received)
    message = messages[0]
    if isinstance(message, wire.Refused):
        if message.may_retry:
            raise ConnectionError(message.reason)
        raise UsageError(message.reason)
    if len(messages) > 1 or not isinstance(message, kind):
        raise WireError(f"{type(message).__name__} instead of {kind.__name__}")
    return message
