"""Proxies that the environment names: not to this host, and as the libraries mean it to others."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import grpc
import pytest

from ppserve.bench.top import ScrapeFailed, fetch_figures
from ppserve.client import Client, RetryPolicy
from ppserve.client.connection import is_this_host, open_channel
from tests.fake_engine import FakeEngine, served_in_thread

WITHIN_S = 20.0


class Proxy:
    """It keeps the first line of each call, and refuses it."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.was_asked = threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection:
                self.asked.append(connection.recv(4096).decode().partition("\r\n")[0])
                connection.sendall(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n")
            self.was_asked.set()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    proxy = Proxy()
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy"):
        monkeypatch.setenv(name, proxy.url)
        monkeypatch.setenv(name.upper(), proxy.url)
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    thread = threading.Thread(target=proxy.serve)
    thread.start()
    yield proxy
    proxy.listener.shutdown(socket.SHUT_RDWR)
    proxy.listener.close()
    thread.join(WITHIN_S)


def test_to_this_host_nothing_goes_through_a_proxy(proxy: Proxy) -> None:
    with served_in_thread(FakeEngine()) as target:
        port = target.rpartition(":")[2]
        for host in ("127.0.0.1", "localhost", "dns:///localhost", "ipv4:127.0.0.1"):
            with Client(f"{host}:{port}", retry=RetryPolicy(max_attempts=1)) as client:
                assert client.complete("hello", max_tokens=2).sequences
        with pytest.raises(ScrapeFailed) as failed:
            fetch_figures(target, WITHIN_S)
    assert "403" not in str(failed.value), "the proxy answered"
    assert proxy.asked == []


def test_to_another_host_everything_does_unless_no_proxy_names_it(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No name below `invalid` exists, so without the proxy it cannot be found."""
    with pytest.raises(ScrapeFailed, match="Forbidden"):
        fetch_figures("elsewhere.invalid:9400", WITHIN_S)
    with open_channel(grpc, "elsewhere.invalid:50051", None) as channel:
        call = channel.unary_unary("/any")
        with pytest.raises(grpc.RpcError):
            call(b"", timeout=WITHIN_S)
    assert [line.split()[:2] for line in proxy.asked[:2]] == [
        ["GET", "http://elsewhere.invalid:9400/load.json"],
        ["CONNECT", "elsewhere.invalid:50051"],
    ]
    monkeypatch.setenv("no_proxy", "elsewhere.invalid")
    with pytest.raises(ScrapeFailed) as failed:
        fetch_figures("elsewhere.invalid:9400", WITHIN_S)
    assert "Forbidden" not in str(failed.value)


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        *[(host, True) for host in ("127.0.0.1", "127.8.9.10", "0.0.0.0", "[::1]", "[::]", "[::ffff:127.0.0.1]")],
        *[(host, True) for host in ("localhost", "LocalHost.", "a.localhost", "localhost6", "ipv6:[::1]")],
        *[(host, False) for host in ("10.0.0.1", "128.0.0.1", "[::2]", "[fe80::1%eth0]", "localhost.example.com")],
        *[(host, False) for host in ("mylocalhost", "example.com", "dns:///example.com", "unix:/localhost", "")],
    ],
)
def test_what_is_this_host(host: str, is_loopback: bool) -> None:
    assert is_this_host(f"{host}:50051") is is_this_host(host) is is_loopback
