"""How stages find the head, and each other: the launcher's store once, then one store per epoch.

torchrun keeps a TCPStore for its ranks. Stage 0 writes the head's control address there; everything
else, each epoch's own store included, is arranged over the control plane.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from ppserve import wire
from ppserve.errors import TransportError
from ppserve.process.environment import RankEnvironment

_LAUNCHER_TIMEOUT = timedelta(seconds=120)
_LOOK_EVERY_S = 0.005


def exchange(start: wire.Start, environment: RankEnvironment) -> tuple[str, int, str]:
    """Stage 0 publishes the control address it was given; the others wait for it: (host, port, token)."""
    launcher_hosts_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=start.stage == 0 and not launcher_hosts_it,
        timeout=_LAUNCHER_TIMEOUT,
        wait_for_workers=False,
    )
    scoped = dist.PrefixStore(f"ppserve/{environment.restart}", store)
    if start.stage == 0:
        scoped.set("control", f"{start.control_host} {start.control_port} {start.token}")
        return start.control_host, start.control_port, start.token
    host, port, token = scoped.get("control").decode().split()
    return host, int(port), token


def open_epoch_store(host: str, timeout: timedelta) -> tuple[dist.TCPStore, int]:
    """Stage 0: a store for one epoch on a free port of `host` and nowhere else; the port."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def join_epoch_store(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """The other stages: connect to it. Raises TransportError."""
    try:
        return dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    except (dist.DistError, RuntimeError) as error:
        raise TransportError(f"cannot reach the epoch's store at {host}:{port}: {error}") from error


def meet(store: dist.Store, stage: int, num_stages: int, is_over: Callable[[], bool]) -> None:
    """Waits until every stage has come to the epoch's store. Raises TransportError when the epoch is over first.

    Connecting a group afterwards takes milliseconds and cannot be interrupted. This wait can, so a stage that dies
    or freezes before it comes does not hold up the others. It polls, as the store's own wait sees nothing else.
    """
    everyone = [f"here/{other}" for other in range(num_stages)]
    try:
        store.set(everyone[stage], "")
        while not store.check(everyone):
            if is_over():
                raise TransportError("the epoch was lost before every stage had come")
            time.sleep(_LOOK_EVERY_S)
    except (dist.DistError, RuntimeError) as error:
        raise TransportError(f"the epoch's store is gone: {error}") from error
