"""Who is let in, without a socket: what a stranger says, and what the head answers."""

from __future__ import annotations

from ppserve import wire
from ppserve.head.engine.handshake import Handshake
from ppserve.process.handshake import make_proof
from tests.architectures import gpt2 as gpt2_architecture
from tests.hellos import hello

SECRET = b"the secret of this server"
ARCH = gpt2_architecture(4, 64, 4, 128, 300, 300, 256)


def proof(handshake: Handshake, rank: int, secret: bytes = SECRET) -> wire.Proof:
    return wire.Proof(rank, make_proof("rank", secret, rank, handshake.challenge.nonce, b"mine"), b"mine")


def test_a_rank_proves_itself_and_greets_once() -> None:
    handshake = Handshake(SECRET, 2)
    answer = handshake.answer(proof(handshake, 1), ())
    assert answer == wire.Welcome(make_proof("head", SECRET, 1, handshake.challenge.nonce, b"mine"))
    assert handshake.rank == 1
    assert handshake.answer(hello(1, 2, ARCH), ()) is None


def test_a_keeper_may_say_that_its_stage_keeps_dying() -> None:
    handshake = Handshake(SECRET, 2)
    handshake.answer(proof(handshake, 0), ())
    assert handshake.answer(wire.Failed("it died 10 times"), ()) is None


def test_a_rank_that_is_connected_may_try_again_and_others_may_not() -> None:
    handshake = Handshake(SECRET, 2)
    assert handshake.answer(proof(handshake, 1), {1}) == wire.Refused(
        "rank 1 is connected already", may_retry=True
    )
    refused = handshake.answer(proof(handshake, 1, b"another secret"), ())
    assert isinstance(refused, wire.Refused)
    assert not refused.may_retry
    assert handshake.rank is None


def test_of_two_that_proved_to_be_one_rank_the_first_to_greet_gets_in() -> None:
    first, second = Handshake(SECRET, 2), Handshake(SECRET, 2)
    for handshake in (first, second):
        assert isinstance(handshake.answer(proof(handshake, 0), ()), wire.Welcome)
    assert first.answer(hello(0, 2, ARCH), ()) is None
    assert isinstance(second.answer(hello(0, 2, ARCH), {0}), wire.Refused)
