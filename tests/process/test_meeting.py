"""Where ranks meet the head, what they share, and who may speak with whom."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest
from msgspec.structs import replace

from ppserve import wire
from ppserve.config import NetworkSettings, ServeConfig
from ppserve.errors import ConfigError, UsageError
from ppserve.process.environment import RankEnvironment
from ppserve.process.meeting import (
    connect_to_head,
    find_meeting,
    make_proof,
    open_meeting,
    read_secret,
)
from ppserve.process.network import connect, listen
from tests.architectures import gpt2 as gpt2_architecture
from tests.hellos import hello as hello_of
from tests.process.heads import SECRET, WITHIN_S, Tap, head
from tests.process.heads import place as place_of

pytestmark = pytest.mark.timeout(60)

ARCH = gpt2_architecture(4, 64, 4, 128, 300, 300, 256)
ONE_HOST = [RankEnvironment(rank, 3, rank, 3) for rank in range(3)]
TWO_HOSTS = [RankEnvironment(rank, 2, 0, 1) for rank in range(2)]


@pytest.fixture(autouse=True)
def launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """What a launcher says to its ranks."""
    for name, value in (("MASTER_ADDR", "head-host"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", f"the one of {tmp_path}")
    return monkeypatch


def meeting(environment: RankEnvironment, **network: Any) -> wire.Meeting:
    return find_meeting(ServeConfig(network=NetworkSettings(**network)), environment)


# ---- one host ----------------------------------------------------------------------------------------------


def test_ranks_of_one_launcher_meet_at_one_name_whatever_becomes_of_files(tmp_path: Path) -> None:
    first, *others = (meeting(rank) for rank in ONE_HOST)
    assert others == [first, first]
    listener, secret = open_meeting(first)
    with listener:
        assert [read_secret(other) for other in others] == [secret, secret]
        connect(others[0].address, WITHIN_S).close()
        assert listener.getsockname().startswith(b"\0"), "it has a file"


def test_a_killed_heads_place_is_free_and_a_living_ones_is_not() -> None:
    here = meeting(ONE_HOST[0])
    for _ in range(2):
        with open_meeting(here)[0], pytest.raises(UsageError, match="another server listens on @ppserve-"):
            open_meeting(here)


def test_another_launcher_has_another_place(launcher: pytest.MonkeyPatch) -> None:
    addresses = {meeting(ONE_HOST[0]).address}
    for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "MASTER_ADDR"):
        launcher.setenv(name, "29501")
        addresses.add(meeting(ONE_HOST[0]).address)
    assert len(addresses) == 4


ANOTHER_USER = """if True:
    import os, socket, sys
    os.setuid(54321)
    what, name = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as own:
        if what == "dials":
            own.connect("\\0" + name)
            sys.exit(own.recv(1) != b"")
        own.bind("\\0" + name)
        own.listen()
        print("listens", flush=True)
        sys.stdin.read()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_another_user_is_not_spoken_with_at_either_end(tmp_path: Path) -> None:
    """Its socket can be found: the kernel says whose it is. One of this user is greeted, as a control."""
    command = [sys.executable, "-c", ANOTHER_USER]
    with head(tmp_path) as listening:
        name = listening.meeting.address.removeprefix("@")
        assert subprocess.run([*command, "dials", name], timeout=WITHIN_S).returncode == 0
        with connect(listening.meeting.address, WITHIN_S) as ours:
            assert ours.recv(1)
    impostor = subprocess.Popen([*command, "listens", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with impostor:
        assert impostor.stdout is not None
        assert impostor.stdout.readline() == b"listens\n"
        with pytest.raises(PermissionError, match="another user"):
            connect(listening.meeting.address, WITHIN_S)
        impostor.communicate()


# ---- several hosts -----------------------------------------------------------------------------------------


def test_ranks_of_several_hosts_meet_beside_the_launchers_port(tmp_path: Path) -> None:
    secret_file = tmp_path / "secret"
    secret_file.write_text("  sixteen letters!\n")
    expected = wire.Meeting("head-host:29501", secret_file, b"sixteen letters!")
    assert [meeting(rank, secret_file=secret_file) for rank in TWO_HOSTS] == [expected] * 2
    chosen = meeting(TWO_HOSTS[1], secret_file=secret_file, control_port=7000)
    assert chosen.address == "head-host:7000"
    for name in ("ca", "cert", "key"):
        (tmp_path / name).write_text(f"a {name}")
    tls = {f"stage_tls_{name}": tmp_path / name for name in ("ca", "cert", "key")}
    assert meeting(TWO_HOSTS[1], secret_file=secret_file, **tls).tls_held == (b"a ca", b"a cert", b"a key")


@pytest.mark.parametrize("contents", [None, b"", b"fifteen letters", b"\n \t" * 40])
def test_a_secret_that_is_missing_or_too_short(tmp_path: Path, contents: bytes | None) -> None:
    path = tmp_path / "weak"
    if contents is not None:
        path.write_bytes(contents)
    with pytest.raises(ConfigError, match="--secret-file"):
        meeting(TWO_HOSTS[0], secret_file=path)
    path.write_bytes(SECRET)
    here = meeting(TWO_HOSTS[0], secret_file=path)
    path.write_bytes(b"  another secret, of a head that was started anew")
    assert read_secret(here) == b"another secret, of a head that was started anew"
    path.unlink() if contents is None else path.write_bytes(contents)
    assert read_secret(here) == SECRET, "a file that is gone later keeps no stage from coming back"


def test_several_hosts_need_an_address_and_a_secret(launcher: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--secret-file: stages on several hosts need one"):
        meeting(TWO_HOSTS[0])
    launcher.delenv("MASTER_ADDR")
    with pytest.raises(UsageError, match="MASTER_ADDR"):
        meeting(TWO_HOSTS[0])


# ---- the handshake -----------------------------------------------------------------------------------------


def hello(rank: int) -> bytes:
    return wire.encode(hello_of(rank, 2, ARCH))


def test_with_another_secret_it_is_told_why_it_is_not(tmp_path: Path) -> None:
    with head(tmp_path), pytest.raises(UsageError, match="another secret"):
        connect_to_head(place_of(tmp_path, b"one more secret of a server"), 1, WITHIN_S)


def test_a_rank_that_is_connected_already_is_tried_again_until_the_time_is_over(tmp_path: Path) -> None:
    with head(tmp_path) as listening, connect_to_head(listening.meeting, 1, WITHIN_S) as first:
        first.sendall(hello(1))
        listening.next_event()
        with pytest.raises(ConnectionError, match="rank 1 is connected already"):
            connect_to_head(listening.meeting, 1, within_s=0)


def test_a_head_that_comes_later_is_found_and_meanwhile_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    meeting = place_of(tmp_path)
    with pytest.raises(ConnectionError, match="refused"):
        connect_to_head(meeting, 0, within_s=0)
    with ThreadPoolExecutor(1) as waiting:
        found = waiting.submit(connect_to_head, meeting, 0, WITHIN_S)
        while not caplog.messages:
            assert not found.done()
        with head(tmp_path):
            found.result(WITHIN_S).close()
    (told,) = caplog.messages
    assert told.startswith(f"cannot reach the head at {meeting.address} yet: "), "nothing says why"


@pytest.mark.parametrize("recorded", [False, True], ids=["made up", "the rank's own proof, sent back"])
def test_a_listener_without_the_secret_is_found_out(tmp_path: Path, recorded: bool) -> None:
    meeting = place_of(tmp_path)
    listener = listen(meeting.address)

    def speak() -> None:
        with listener, listener.accept()[0] as connection:
            connection.sendall(wire.encode(wire.Challenge(b"c" * 32)))
            (answer,) = wire.FrameReader(wire.Proof).feed(connection.recv(4096))
            connection.sendall(wire.encode(wire.Welcome(answer.proof if recorded else b"p" * 32)))
            connection.recv(1)

    impostor = threading.Thread(target=speak, daemon=True)
    impostor.start()
    with pytest.raises(UsageError, match="does not know this server's secret"):
        connect_to_head(meeting, 1, WITHIN_S)
    impostor.join(WITHIN_S)


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n", wire.encode(wire.Ping(1)), b"\xff" * 5000])
def test_what_is_no_greeting_is_tried_again_until_the_time_is_over(tmp_path: Path, said: bytes) -> None:
    meeting = place_of(tmp_path)
    with listen(meeting.address) as listener:

        def speak() -> None:
            with listener.accept()[0] as connection:
                connection.sendall(said)

        speaking = threading.Thread(target=speak, daemon=True)
        speaking.start()
        with pytest.raises(ConnectionError):
            connect_to_head(meeting, 1, within_s=0)
        speaking.join(WITHIN_S)


def test_proofs_differ_by_everything_that_goes_into_them() -> None:
    inputs = [(SECRET, 1, b"c", b"n"), (b"x", 1, b"c", b"n"), (SECRET, 2, b"c", b"n"), (SECRET, 1, b"d", b"n")]
    inputs += [(SECRET, 1, b"c", b"m"), (SECRET, 1, b"cn", b""), (SECRET, 1, b"", b"cn")]
    sides: tuple[Literal["rank", "head"], ...] = ("rank", "head")
    proofs = [make_proof(side, *values) for values in inputs for side in sides]
    assert len(set(proofs)) == len(proofs)
    assert make_proof("rank", *inputs[0]) == proofs[0]


def test_a_recorded_greeting_tells_no_secret_and_cannot_be_used_again(tmp_path: Path) -> None:
    with head(tmp_path) as listening:
        tap = Tap(tmp_path, listening.meeting.address)
        with connect_to_head(replace(listening.meeting, address=tap.address), 1, WITHIN_S) as connection:
            connection.sendall(hello(1))
            assert isinstance(listening.next_event().message, wire.Hello)
        tap.join()
        assert listening.next_event().cause == "exit"
        assert hello(1) in tap.up, "the tap has heard nothing"
        assert SECRET not in tap.up + tap.down
        with connect(listening.meeting.address, WITHIN_S) as replay:
            replay.sendall(tap.up[: tap.up.index(hello(1))])
            heard = b"".join(iter(lambda: replay.recv(4096), b""))
        answers = wire.FrameReader(wire.FromHead).feed(heard)
        assert [type(answer) for answer in answers] == [wire.Challenge, wire.Refused]
        with connect_to_head(listening.meeting, 0, WITHIN_S) as other:
            other.sendall(hello(0))
            assert listening.next_event().rank == 0, "the replayed greeting was heard before"
