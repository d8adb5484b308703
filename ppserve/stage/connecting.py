"""How a stage is connected to its neighbours: processes by groups of torch.distributed, threads by queues.

The processes of an epoch find each other in a store, whose address the head tells them.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from ppserve import wire
from ppserve.errors import TransportError
from ppserve.process.network import GLOO_INTERFACE, family_of, interface_of, interfaces, is_loopback
from ppserve.stage import parallel_state
from ppserve.stage.link import HeadLink
from ppserve.stage.transport import Frames, Transport, create_gather, create_transport, kind_of
from ppserve.stage.transport.gather import NoGather, StageGather, connect_ranks
from ppserve.stage.transport.local import LocalTransport, QueuePair, make_queues

_FORM_TIMEOUT = timedelta(seconds=20)
_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class Connections:
    """A rank's connections in one epoch."""

    transport: Transport
    """Carries hidden states from the previous stage and to the next."""
    gather: StageGather
    """Exchanges columns with the other tensor ranks of the stage."""


class Connector(Protocol):
    """Makes a stage's connections, for one epoch at a time."""

    def connect(self, form: wire.Form, frames: Frames, link: HeadLink) -> Connections:
        """Connect this rank to the others of the epoch. All ranks must call this. Raises TransportError or
        RuntimeError; `leave_epoch` must be called even then."""

    def leave_epoch(self) -> None:
        """Release what the last `connect` made. It may be called twice."""


class ProcessConnector:
    """Connects a stage that is a process. The ranks find each other in the epoch's store, and form groups. ports:
    the first and the last port that the store may have; None: any."""

    def __init__(self, ports: tuple[int, int] | None = None) -> None:
        self._ports = ports

    def connect(self, form: wire.Form, frames: Frames, link: HeadLink) -> Connections:
        layout = form.layout
        is_alone = layout.num_places == 1
        if not is_alone:
            self._join(form, link)
        transport = create_transport(form.transport, frames, None if is_alone else parallel_state.get_pp_group())
        try:
            gather = (
                create_gather(form.transport, parallel_state.get_tp_group())
                if layout.num_tensor > 1
                else NoGather()
            )
        except (TransportError, RuntimeError):
            transport.close()
            raise
        return Connections(transport, gather)

    def _join(self, form: wire.Form, link: HeadLink) -> None:
        layout = form.layout
        if form.store_port is None:
            store, port = open_epoch_store(form.store_host, _FORM_TIMEOUT, self._ports)
            link.send(wire.StoreOpened(form.epoch, port))
        else:
            store = join_epoch_store(form.store_host, form.store_port, _FORM_TIMEOUT)
        wait_for_ranks(store, layout.place, layout.num_places, lambda: link.abandoned >= form.epoch)
        _name_interface(form.address)
        kind = kind_of(form.transport)
        kind.prepare()
        start_world(kind.group_backend, store, layout.place, layout.num_places, _FORM_TIMEOUT)
        parallel_state.initialize_model_parallel(layout.num_tensor, layout.num_stages)

    def leave_epoch(self) -> None:
        """Leave the groups. Its connections end, which wakes up stages that wait for this one."""
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()


def open_epoch_store(
    host: str, timeout: timedelta, ports: tuple[int, int] | None = None
) -> tuple[dist.TCPStore, int]:
    """Open a store on a free port of `host`, and return it with its port. Stage 0 calls this. Raises
    TransportError."""
    listener = _listen(host, ports)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def _listen(host: str, ports: tuple[int, int] | None) -> socket.socket:
    first, last = ports or (0, 0)
    for port in range(first, last + 1):
        try:
            return socket.create_server((host, port), family=family_of(host))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise TransportError(f"--stage-ports: none of {first} to {last} is free on {host}")


def join_epoch_store(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Connect to the store. The other stages call this. Raises TransportError. The store listens before any stage
    is told of it; so if it refuses the connection, its stage is gone. (torch alone would retry for longer than
    `timeout`.)"""
    try:
        socket.create_connection((host, port), timeout.total_seconds()).close()
        return dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    except (OSError, dist.DistError, RuntimeError) as error:
        raise TransportError(f"cannot reach the epoch's store at {host}:{port}: {error}") from error


def wait_for_ranks(store: dist.Store, place: int, num_places: int, is_over: Callable[[], bool]) -> None:
    """Wait until every rank of the replica is here. Raises TransportError if the epoch ends first.

    Connecting a group takes milliseconds, and cannot be interrupted. This wait can be, so a stage that dies before
    it is here does not hold up the others. It polls, because the store's own wait would not see the end of the
    epoch.
    """
    ranks = [f"here/{other}" for other in range(num_places)]
    try:
        store.set(ranks[place], "")
        while not store.check(ranks):
            if is_over():
                raise TransportError("the epoch was lost before every stage had come")
            time.sleep(_POLL_S)
    except (dist.DistError, RuntimeError) as error:
        raise TransportError(f"the epoch's store is gone: {error}") from error


def start_world(backend: str, store: dist.Store, place: int, num_places: int, timeout: timedelta) -> None:
    """Call `init_process_group`. Raises RuntimeError if a rank is gone; then the process may try again in another
    store.

    torch names a group by a number that each process counts for itself, also where the group could not be made,
    and begins anew when a world ends. Without that a survivor and a new process would wait for each other under
    different names, in every epoch.
    """
    try:
        dist.init_process_group(backend, store=store, rank=place, world_size=num_places, timeout=timeout)
    except RuntimeError:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
        raise


def _name_interface(address: str) -> None:
    """Tell gloo and NCCL the interface of this address. By themselves they would take that of the host's name,
    which is often the loopback. What the operator has set is kept, but not within one host, where that interface
    need not exist."""
    name = interface_of(address, interfaces())
    if name is not None:
        for variable, value in ((GLOO_INTERFACE, name), ("NCCL_SOCKET_IFNAME", f"={name}")):
            if is_loopback(address) or variable not in os.environ:
                os.environ[variable] = value


class ThreadConnector:
    """Connects stages that are threads, by queues. All ranks of a replica share one object."""

    def __init__(self) -> None:
        self._opening = threading.Lock()
        self._epoch = 0
        self._columns: tuple[tuple[QueuePair, ...], ...] = ()
        self._gathers: tuple[tuple[StageGather, ...], ...] = ()

    def connect(self, form: wire.Form, frames: Frames, link: HeadLink) -> Connections:
        layout = form.layout
        if form.store_port is None:
            # The head invites the other ranks once it has heard of a store.
            link.send(wire.StoreOpened(form.epoch, port=1))
        with self._opening:
            if form.epoch != self._epoch:
                self._epoch = form.epoch
                self._columns = tuple(make_queues(layout.num_stages) for _ in range(layout.num_tensor))
                self._gathers = tuple(connect_ranks(layout.num_tensor) for _ in range(layout.num_stages))
            transport = LocalTransport(frames, self._columns[layout.tensor][layout.stage])
            return Connections(transport, self._gathers[layout.stage][layout.tensor])

    def leave_epoch(self) -> None:
        """Do nothing: queues are dropped with their transports."""
