"""Mutual TLS of the control plane: who gets in, and that frames pass both ways at once."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest

from ppserve import wire
from ppserve.config import NetworkSettings
from ppserve.core.architecture import StageLayout
from ppserve.errors import ConfigError
from ppserve.head.engine.control import Received
from ppserve.process.handshake import connect_to_head
from ppserve.process.network import connect
from ppserve.process.tls import read_files, stage_context
from ppserve.stage.link import SocketHeadLink
from tests.architectures import gpt2 as gpt2_architecture
from tests.certificates import make_certificates, needs_openssl
from tests.hellos import hello as hello_of
from tests.process.heads import WITHIN_S, head

pytestmark = needs_openssl

hello = partial(hello_of, world_size=2, architecture=gpt2_architecture(4, 64, 4, 128, 300, 300, 256))

LARGE = wire.Broken(1, "x" * 3_000_000)
FORM = wire.Form(1, StageLayout(0, 1, 0, 4), 100, 768, "t" * 3_000_000, "127.0.0.1", None, "::1")


def files(folder: Path) -> NetworkSettings:
    folder.mkdir(exist_ok=True)
    make_certificates(folder)
    return settings(folder / "leaf.pem", folder / "leaf.key", folder / "ca.pem")


def settings(cert: Path | None, key: Path | None, authority: Path | None) -> NetworkSettings:
    return NetworkSettings(stage_tls_cert=cert, stage_tls_key=key, stage_tls_ca=authority)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> NetworkSettings:
    return files(tmp_path_factory.mktemp("tls"))


def test_frames_longer_than_any_buffer_pass_both_ways_at_once(tmp_path: Path, tls: NetworkSettings) -> None:
    with head(tmp_path, tls=tls) as running, connect_to_head(running.endpoint, 1, WITHIN_S) as connection:
        link = SocketHeadLink(connection, lambda _code: None)
        link.start(lambda _: None)
        link.send(hello(1))
        assert running.next_event().message == hello(1)
        says = threading.Thread(target=lambda: [link.send(LARGE) for _ in range(5)])
        says.start()
        for _ in range(5):
            running.send(1, FORM)
        assert [link.inbox.get(timeout=WITHIN_S)[1] for _ in range(5)] == [FORM] * 5
        assert [running.next_event().message for _ in range(5)] == [LARGE] * 5
        says.join(WITHIN_S)
        running.send(1, wire.Shutdown())
        assert isinstance(link.inbox.get(timeout=WITHIN_S)[1], wire.Shutdown)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has files that are in memory alone")
@pytest.mark.parametrize("removed", ["ca.pem", "leaf.pem", "leaf.key"])
def test_a_stage_that_is_started_after_a_file_is_gone_has_what_it_held(
    removed: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = files(tmp_path / "own")
    with head(tmp_path, tls=own) as running:
        held = msgspec.structs.replace(running.endpoint, tls_held=read_files(own))
        (tmp_path / "own" / removed).unlink()
        with pytest.raises(ConfigError, match="No such file"):
            connect_to_head(running.endpoint, 1, WITHIN_S)
        with connect_to_head(held, 1, WITHIN_S) as connection:
            connection.sendall(wire.encode(hello(1)))
            assert running.next_event().message == hello(1)
    assert f"{removed} is gone; what the three files held at the start is used" in caplog.text


@pytest.mark.parametrize("part", ["ca", "cert", "key"])
def test_a_file_that_is_not_there_at_the_start_is_named(part: str, tls: NetworkSettings, tmp_path: Path) -> None:
    lacking = replace(tls, **{f"stage_tls_{part}": tmp_path / "none"})
    with pytest.raises(ConfigError, match=f"--stage-tls-{part}: .*none: No such file"):
        read_files(lacking)


def test_another_authority_nothing_and_garbage_do_not_get_in(tmp_path: Path, tls: NetworkSettings) -> None:
    other = files(tmp_path / "other")
    with head(tmp_path, tls=tls) as running:
        endpoint = running.endpoint
        for wrong in (other, settings(other.stage_tls_cert, other.stage_tls_key, tls.stage_tls_ca)):
            with pytest.raises(ConnectionError):
                connect_to_head(wire.HeadEndpoint(endpoint.address, endpoint.secret_file, b"", wrong), 0, 0.0)
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + b"\xff" * 4000, wire.encode(hello(0))):
            with connect(endpoint.address, WITHIN_S) as stranger:
                stranger.sendall(garbage)
                try:
                    while stranger.recv(4096):
                        pass
                except ConnectionResetError:
                    pass
        with connect_to_head(endpoint, 0, WITHIN_S) as connection:
            connection.sendall(wire.encode(hello(0)))
            assert isinstance(running.next_event(), Received)


def test_files_that_cannot_be_used(tls: NetworkSettings, tmp_path: Path) -> None:
    cert, key, authority = tls.stage_tls_cert, tls.stage_tls_key, tls.stage_tls_ca
    for wrong, flag in [
        (settings(cert, authority, authority), "--stage-tls-cert"),
        (settings(cert, key, key), "--stage-tls-ca"),
        (settings(cert, key, tmp_path / "none"), "--stage-tls-ca"),
    ]:
        with pytest.raises(ConfigError) as refusal:
            stage_context(wrong, serves=True)
        assert refusal.value.name == flag
