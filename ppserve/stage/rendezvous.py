"""How stages find each other: in one store per epoch, whose place the head tells them."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from ppserve.errors import TransportError

_LOOK_EVERY_S = 0.005


def open_epoch_store(
    host: str, timeout: timedelta, ports: tuple[int, int] | None = None
) -> tuple[dist.TCPStore, int]:
    """Stage 0: a store for one epoch on a free port of `host` and nowhere else; the port. ports: the first and the
    last that it may be. Raises TransportError if none of them is free."""
    listener = _listener(host, ports)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def _listener(host: str, ports: tuple[int, int] | None) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if ports is None:
        return socket.create_server((host, 0), family=family)
    for port in range(ports[0], ports[1] + 1):
        try:
            return socket.create_server((host, port), family=family)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise TransportError(f"--stage-ports: none of {ports[0]} to {ports[1]} is free on {host}")


def join_epoch_store(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """The other stages: connect to it. Raises TransportError.

    It listens before any stage is told of it. So if the connection is refused, its stage is gone. torch would try
    again for longer than `timeout`, and cannot be interrupted meanwhile.
    """
    try:
        socket.create_connection((host, port), timeout.total_seconds()).close()
        return dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    except (OSError, dist.DistError, RuntimeError) as error:
        raise TransportError(f"cannot reach the epoch's store at {host}:{port}: {error}") from error


def wait_for_ranks(store: dist.Store, place: int, num_places: int, is_over: Callable[[], bool]) -> None:
    """Waits until every rank of the replica has come to the epoch's store.

    Raises TransportError when the epoch is over first.

    Connecting a group afterwards takes milliseconds and cannot be interrupted. This wait can, so a stage that dies
    or freezes before it comes does not hold up the others. It polls, as the store's own wait sees nothing else.
    """
    everyone = [f"here/{other}" for other in range(num_places)]
    try:
        store.set(everyone[place], "")
        while not store.check(everyone):
            if is_over():
                raise TransportError("the epoch was lost before every stage had come")
            time.sleep(_LOOK_EVERY_S)
    except (dist.DistError, RuntimeError) as error:
        raise TransportError(f"the epoch's store is gone: {error}") from error
