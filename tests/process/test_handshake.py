"""What a rank and a head say until each has proved itself, and what a listener learns from it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import pytest
from msgspec.structs import replace

from ppserve import wire
from ppserve.errors import UsageError
from ppserve.process.handshake import connect_to_head, make_proof
from ppserve.process.network import connect, listen
from tests.architectures import gpt2 as gpt2_architecture
from tests.hellos import hello as hello_of
from tests.process.heads import SECRET, WITHIN_S, Tap, head, place

pytestmark = pytest.mark.timeout(60)

ARCH = gpt2_architecture(4, 64, 4, 128, 300, 300, 256)


def hello(rank: int) -> bytes:
    return wire.encode(hello_of(rank, 2, ARCH))


def test_with_another_secret_it_is_told_why_it_is_not(tmp_path: Path) -> None:
    with head(tmp_path), pytest.raises(UsageError, match="another secret"):
        connect_to_head(place(tmp_path, b"one more secret of a server"), 1, WITHIN_S)


def test_a_rank_that_is_connected_already_is_tried_again_until_the_time_is_over(tmp_path: Path) -> None:
    with head(tmp_path) as listening, connect_to_head(listening.endpoint, 1, WITHIN_S) as first:
        first.sendall(hello(1))
        listening.next_event()
        with pytest.raises(ConnectionError, match="rank 1 is connected already"):
            connect_to_head(listening.endpoint, 1, within_s=0)


def test_a_head_that_comes_later_is_found_and_meanwhile_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = place(tmp_path)
    with pytest.raises(ConnectionError, match="refused"):
        connect_to_head(endpoint, 0, within_s=0)
    with ThreadPoolExecutor(1) as waiting:
        found = waiting.submit(connect_to_head, endpoint, 0, WITHIN_S)
        while not caplog.messages:
            assert not found.done()
        with head(tmp_path):
            found.result(WITHIN_S).close()
    (told,) = caplog.messages
    assert told.startswith(f"cannot reach the head at {endpoint.address} yet: "), "nothing says why"


@pytest.mark.parametrize("recorded", [False, True], ids=["made up", "the rank's own proof, sent back"])
def test_a_listener_without_the_secret_is_found_out(tmp_path: Path, recorded: bool) -> None:
    endpoint = place(tmp_path)
    listener = listen(endpoint.address)

    def speak() -> None:
        with listener, listener.accept()[0] as connection:
            connection.sendall(wire.encode(wire.Challenge(b"c" * 32)))
            (answer,) = wire.FrameReader(wire.Proof).feed(connection.recv(4096))
            connection.sendall(wire.encode(wire.Welcome(answer.proof if recorded else b"p" * 32)))
            connection.recv(1)

    impostor = threading.Thread(target=speak, daemon=True)
    impostor.start()
    with pytest.raises(UsageError, match="does not know this server's secret"):
        connect_to_head(endpoint, 1, WITHIN_S)
    impostor.join(WITHIN_S)


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n", wire.encode(wire.Ping(1)), b"\xff" * 5000])
def test_what_is_no_handshake_is_tried_again_until_the_time_is_over(tmp_path: Path, said: bytes) -> None:
    endpoint = place(tmp_path)
    with listen(endpoint.address) as listener:

        def speak() -> None:
            with listener.accept()[0] as connection:
                connection.sendall(said)

        speaking = threading.Thread(target=speak, daemon=True)
        speaking.start()
        with pytest.raises(ConnectionError):
            connect_to_head(endpoint, 1, within_s=0)
        speaking.join(WITHIN_S)


def test_proofs_differ_by_everything_that_goes_into_them() -> None:
    inputs = [(SECRET, 1, b"c", b"n"), (b"x", 1, b"c", b"n"), (SECRET, 2, b"c", b"n"), (SECRET, 1, b"d", b"n")]
    inputs += [(SECRET, 1, b"c", b"m"), (SECRET, 1, b"cn", b""), (SECRET, 1, b"", b"cn")]
    sides: tuple[Literal["rank", "head"], ...] = ("rank", "head")
    proofs = [make_proof(side, *values) for values in inputs for side in sides]
    assert len(set(proofs)) == len(proofs)
    assert make_proof("rank", *inputs[0]) == proofs[0]


def test_a_recorded_handshake_tells_no_secret_and_cannot_be_used_again(tmp_path: Path) -> None:
    with head(tmp_path) as listening:
        tap = Tap(tmp_path, listening.endpoint.address)
        with connect_to_head(replace(listening.endpoint, address=tap.address), 1, WITHIN_S) as connection:
            connection.sendall(hello(1))
            assert isinstance(listening.next_event().message, wire.Hello)
        tap.join()
        assert listening.next_event().cause == "exit"
        assert hello(1) in tap.up, "the tap has heard nothing"
        assert SECRET not in tap.up + tap.down
        with connect(listening.endpoint.address, WITHIN_S) as replay:
            replay.sendall(tap.up[: tap.up.index(hello(1))])
            heard = b"".join(iter(lambda: replay.recv(4096), b""))
        answers = wire.FrameReader(wire.FromHead).feed(heard)
        assert [type(answer) for answer in answers] == [wire.Challenge, wire.Refused]
        with connect_to_head(listening.endpoint, 0, WITHIN_S) as other:
            other.sendall(hello(0))
            assert listening.next_event().rank == 0, "the replayed handshake was heard before"
