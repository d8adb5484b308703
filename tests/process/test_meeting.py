"""Where ranks meet the head, what they share, and who may speak with whom."""

from __future__ import annotations

import os
import stat
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest
from msgspec.structs import replace

from ppserve import wire
from ppserve.config import NetworkSettings, ServeConfig
from ppserve.core.architecture import Architecture
from ppserve.errors import ConfigError, UsageError
from ppserve.process.environment import RankEnvironment
from ppserve.process.meeting import (
    MIN_SECRET_BYTES,
    close_meeting,
    connect_to_head,
    find_meeting,
    make_proof,
    open_meeting,
    read_secret,
)
from ppserve.process.network import connect, listen
from tests.hellos import hello as hello_of
from tests.process.heads import SECRET, WITHIN_S, Tap, head
from tests.process.heads import place as place_of

pytestmark = pytest.mark.timeout(60)

ARCH = Architecture(4, 64, 4, 128, 300, 300, 256)
ONE_HOST = [RankEnvironment(rank, 3, rank, 3) for rank in range(3)]
TWO_HOSTS = [RankEnvironment(rank, 2, 0, 1) for rank in range(2)]


@pytest.fixture
def place() -> Iterator[Path]:
    """For sockets. pytest's own directories have too long names."""
    with tempfile.TemporaryDirectory(prefix="pp-") as directory:
        yield Path(directory)


@pytest.fixture(autouse=True)
def launcher(monkeypatch: pytest.MonkeyPatch, place: Path) -> pytest.MonkeyPatch:
    """What a launcher says to its ranks."""
    for name, value in (("MASTER_ADDR", "head-host"), ("MASTER_PORT", "29500"), ("TORCHELASTIC_RUN_ID", "none")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    return monkeypatch


def meeting(environment: RankEnvironment, **network: Any) -> wire.Meeting:
    return find_meeting(ServeConfig(network=NetworkSettings(**network)), environment)


# ---- one host ----------------------------------------------------------------------------------------------


def test_ranks_of_one_launcher_meet_where_no_other_user_can_with_one_secret(place: Path) -> None:
    first, *others = (meeting(rank) for rank in ONE_HOST)
    assert others == [first, first]
    assert isinstance(first.address, str)
    with pytest.raises(FileNotFoundError):
        read_secret(first)
    listener, secret = open_meeting(first)
    with listener:
        assert len(secret) >= MIN_SECRET_BYTES
        assert [read_secret(other) for other in others] == [secret, secret]
        connect(others[0].address, WITHIN_S).close()
    directory = first.secret_file.parent
    assert directory.parent == place
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(first.secret_file.stat().st_mode) == 0o600


def test_a_killed_heads_place_is_taken_over_and_a_living_ones_is_not(place: Path) -> None:
    """Each head has a new secret, and one that ends leaves nothing."""
    here = meeting(ONE_HOST[0])
    listener, first = open_meeting(here)
    listener.close()
    listener, second = open_meeting(here)
    with listener:
        with pytest.raises(UsageError, match="another server"):
            open_meeting(here)
        assert read_secret(here) == second != first
    close_meeting(here)
    assert list(place.iterdir()) == []


def test_another_launcher_has_another_place_and_none_has_too_long_a_name_for_sockets(
    launcher: pytest.MonkeyPatch, place: Path
) -> None:
    addresses = {meeting(ONE_HOST[0]).address}
    for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "MASTER_ADDR"):
        launcher.setenv(name, "29501")
        addresses.add(meeting(ONE_HOST[0]).address)
    assert len(addresses) == 4
    long = place / ("x" * 90)
    long.mkdir()
    launcher.setenv("XDG_RUNTIME_DIR", str(long))
    assert len(os.fsencode(str(meeting(ONE_HOST[0]).address))) <= 103


@pytest.mark.parametrize("is_link", [False, True])
def test_a_directory_that_others_can_open_is_refused(place: Path, is_link: bool) -> None:
    here = meeting(ONE_HOST[0])
    open_meeting(here)[0].close()
    directory = here.secret_file.parent
    if is_link:
        directory.rename(place / "elsewhere")
        directory.symlink_to(place / "elsewhere")
    else:
        directory.chmod(0o755)
    for act in (open_meeting, read_secret):
        with pytest.raises(UsageError, match="this user alone"):
            act(here)


# ---- several hosts -----------------------------------------------------------------------------------------


def test_ranks_of_several_hosts_meet_beside_the_launchers_port(tmp_path: Path) -> None:
    secret_file = tmp_path / "secret"
    secret_file.write_text("  sixteen letters!\n")
    expected = wire.Meeting("head-host:29501", secret_file, is_ours=False)
    assert read_secret(expected) == b"sixteen letters!"
    assert [meeting(rank, secret_file=secret_file) for rank in TWO_HOSTS] == [expected] * 2
    chosen = meeting(TWO_HOSTS[1], secret_file=secret_file, control_port=7000)
    assert chosen.address == "head-host:7000"


@pytest.mark.parametrize("contents", [None, b"", b"fifteen letters", b"\n \t" * 40])
def test_a_secret_that_is_missing_or_too_short(tmp_path: Path, contents: bytes | None) -> None:
    path = tmp_path / "weak"
    if contents is not None:
        path.write_bytes(contents)
    with pytest.raises(ConfigError, match="--secret-file"):
        read_secret(meeting(TWO_HOSTS[0], secret_file=path))


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


def test_a_head_that_comes_later_is_found(tmp_path: Path) -> None:
    meeting = place_of(tmp_path)
    with pytest.raises(ConnectionError, match="head"):
        connect_to_head(meeting, 0, within_s=0)
    with ThreadPoolExecutor(1) as waiting:
        found = waiting.submit(connect_to_head, meeting, 0, WITHIN_S)
        with head(tmp_path):
            found.result(WITHIN_S).close()


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
