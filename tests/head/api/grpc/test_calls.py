"""Where a gRPC call comes from."""

from __future__ import annotations

from typing import Any

import pytest

from ppserve.head.api.grpc.calls import call_from


class Context:
    """As much of grpc's as a call is made of."""

    def __init__(self, peer: str) -> None:
        self._peer = peer

    def peer(self) -> str:
        return self._peer

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer_identities(self) -> None:
        return None

    def time_remaining(self) -> None:
        return None


@pytest.mark.parametrize(
    ("peer", "is_local"),
    [
        ("ipv4:127.0.0.1:50000", True),
        ("ipv6:[::1]:50000", True),
        ("ipv6:%5B::1%5D:50000", True),
        ("ipv6:[::ffff:127.0.0.1]:50000", True),
        ("unix:", True),
        ("ipv4:10.0.0.7:50000", False),
        ("ipv6:[2001:db8::1]:50000", False),
        ("ipv6:[::ffff:10.0.0.7]:50000", False),
        ("", False),
    ],
)
def test_who_calls_from_the_heads_own_host(peer: str, is_local: bool) -> None:
    context: Any = Context(peer)
    assert call_from(context, keys_are_checked=False).is_local == is_local
