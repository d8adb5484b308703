"""How a stage is joined to its neighbours: processes by groups of torch.distributed, threads by queues."""

from __future__ import annotations

import logging
import os
import threading
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

import parallel_state
from ppserve import wire
from ppserve.core.architecture import StageLayout
from ppserve.process.interfaces import interface_of, interfaces
from ppserve.stage import rendezvous
from ppserve.stage.link import Link
from ppserve.stage.transport import Frames, Transport, create_transport
from ppserve.stage.transport.gather import TensorLink, connect_ranks
from ppserve.stage.transport.gather_group import create_gather
from ppserve.stage.transport.local import Ends, LocalTransport, make_ends

log = logging.getLogger(__name__)

_FORM_TIMEOUT = timedelta(seconds=20)


class Wiring(Protocol):
    """Makes a stage's transports, one per epoch."""

    def open_transport(self, form: wire.Form, layout: StageLayout, frames: Frames, link: Link) -> Transport:
        """A transport for the epoch of `form`; every stage calls it.

        link: to tell the head where the epoch's store is, and to hear that the epoch is lost meanwhile. Raises
        TransportError or RuntimeError; `leave_epoch` is due even then.
        """

    def open_gather(self, form: wire.Form, layout: StageLayout) -> TensorLink:
        """To the other tensor ranks of the stage, after `open_transport`; every one of them calls it. Raises as
        that does."""

    def leave_epoch(self) -> None:
        """Releases what the newest transport was made from. May be called twice."""


class ProcessGroupWiring:
    """A stage that is a process: it meets the others in the epoch's store, and they form groups. ports: of the
    store, the first and the last."""

    def __init__(self, ports: tuple[int, int] | None = None) -> None:
        self._ports = ports

    def open_transport(self, form: wire.Form, layout: StageLayout, frames: Frames, link: Link) -> Transport:
        if layout.num_places > 1:
            self._join(form, layout, link)
        return create_transport(form.transport, frames)

    def _join(self, form: wire.Form, layout: StageLayout, link: Link) -> None:
        if form.store_port == 0:
            store, port = rendezvous.open_epoch_store(form.store_host, _FORM_TIMEOUT, self._ports)
            link.send(wire.StoreOpened(form.epoch, port))
        else:
            store = rendezvous.join_epoch_store(form.store_host, form.store_port, _FORM_TIMEOUT)
        rendezvous.wait_for_ranks(store, layout.place, layout.num_places, lambda: link.abandoned >= form.epoch)
        _name_interface(form.address)
        if form.transport == "nccl":
            _keep_watchdog_from_ending_us()
        dist.init_process_group(
            "nccl" if form.transport == "nccl" else "gloo",
            store=store,
            rank=layout.place,
            world_size=layout.num_places,
            timeout=_FORM_TIMEOUT,
        )
        parallel_state.initialize_model_parallel(layout.num_tensor, layout.num_stages)

    def open_gather(self, form: wire.Form, layout: StageLayout) -> TensorLink:
        return create_gather(form.transport)

    def leave_epoch(self) -> None:
        """Stages further on, blocked on this one, wake up as its connections end."""
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()


def _name_interface(address: str) -> None:
    """Tells gloo and NCCL which interface to use. Else they would use the one that this host's own name leads to,
    on many hosts the loopback. What the operator tells them wins."""
    name = interface_of(address, interfaces())
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def _keep_watchdog_from_ending_us() -> None:
    """torch's thread beside NCCL ends the whole process when an exchange fails or is late, as after a neighbour's
    death: it waits a minute for its dump and throws an exception that cannot be caught. Survivors would lose their
    weights. Here the head notices losses, and the stage aborts its groups. What the operator says wins."""
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "0")


class ThreadWiring:
    """Stages that are threads of one process: one object for a whole replica, which hands each rank its two
    ends."""

    def __init__(self) -> None:
        self._opening = threading.Lock()
        self._epoch = 0
        self._columns: tuple[tuple[Ends, ...], ...] = ()
        self._gathers: tuple[tuple[TensorLink, ...], ...] = ()

    def open_transport(self, form: wire.Form, layout: StageLayout, frames: Frames, link: Link) -> Transport:
        if form.store_port == 0:
            # The head invites the others once it has heard of a store: of any.
            link.send(wire.StoreOpened(form.epoch, port=1))
        with self._opening:
            if form.epoch != self._epoch:
                self._epoch = form.epoch
                self._columns = tuple(make_ends(layout.num_stages) for _ in range(layout.num_tensor))
                self._gathers = tuple(connect_ranks(layout.num_tensor) for _ in range(layout.num_stages))
            return LocalTransport(frames, self._columns[layout.tensor][layout.stage])

    def open_gather(self, form: wire.Form, layout: StageLayout) -> TensorLink:
        return self._gathers[layout.stage][layout.tensor]

    def leave_epoch(self) -> None:
        """Nothing to do: queues go with the transports that use them."""
