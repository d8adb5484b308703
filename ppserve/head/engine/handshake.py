"""Who is let in: a stranger must prove that it knows the secret, and be a rank that is not connected.

The head sends a Challenge. The stranger answers with a Proof, and gets a Welcome, which proves the same of the
head. Then a stage sends its Hello, or a keeper a Failed. What the proofs are made of: `process.handshake`.

Policy only: messages are arguments, and the answer is a value.
"""

from __future__ import annotations

from collections.abc import Container
from hmac import compare_digest

from ppserve import wire
from ppserve.process.handshake import make_proof, new_nonce


class Handshake:
    """The handshake on one connection, from the Challenge to the first message of a rank."""

    def __init__(self, secret: bytes, world_size: int) -> None:
        self.challenge = wire.Challenge(new_nonce())
        """The head's first message."""
        self.rank: int | None = None
        """The rank that the stranger has proved to be; None before that."""
        self._secret = secret
        self._world_size = world_size

    def answer(
        self, message: wire.Proof | wire.FromStage, connected: Container[int]
    ) -> wire.Welcome | wire.Refused | None:
        """Return the head's answer; None when the handshake is complete. After a Refused the connection ends.

        connected: the ranks that are connected now. The end of a rank's last process may be unread, so a proof of
        such a rank may be sent again later.
        """
        if isinstance(message, wire.Proof):
            return self._check_proof(message, connected)
        is_hello = isinstance(message, wire.Hello) and message.rank == self.rank
        if not (is_hello or isinstance(message, wire.Failed)) or self.rank is None or self.rank in connected:
            return wire.Refused("this message has no place in the handshake, or comes too late", may_retry=False)
        return None

    def _check_proof(self, proof: wire.Proof, connected: Container[int]) -> wire.Welcome | wire.Refused:
        ours, theirs = self.challenge.nonce, proof.nonce
        if not compare_digest(proof.proof, make_proof("rank", self._secret, proof.rank, ours, theirs)):
            return wire.Refused("the head has another secret than this stage", may_retry=False)
        if not 0 <= proof.rank < self._world_size:
            return wire.Refused(f"there is no rank {proof.rank}", may_retry=False)
        if self.rank is not None:
            return wire.Refused("a proof is sent once", may_retry=False)
        if proof.rank in connected:
            return wire.Refused(f"rank {proof.rank} is connected already", may_retry=True)
        self.rank = proof.rank
        return wire.Welcome(make_proof("head", self._secret, proof.rank, ours, theirs))
