"""How the head and a rank prove to each other that they know the server's secret, without sending it.

Each side sends a random number that it has never used before, and answers the other's with a keyed hash of both.
A recorded answer fits no other connection, and the two sides' answers differ, so neither can be sent back.
"""

from __future__ import annotations

import hmac
import secrets
from hmac import compare_digest as is_same

__all__ = ["head_proof", "is_same", "new_nonce", "rank_proof"]


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
