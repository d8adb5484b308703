"""Meeting in an epoch's store: together, or not at all."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from ppserve.errors import TransportError
from ppserve.stage.wiring import join_epoch_store, open_epoch_store, wait_for_ranks

pytestmark = pytest.mark.timeout(60)
TIMEOUT = timedelta(seconds=20)


def open_stores(count: int) -> list[dist.Store]:
    store, port = open_epoch_store("127.0.0.1", TIMEOUT)
    return [store, *(join_epoch_store("127.0.0.1", port, TIMEOUT) for _ in range(count - 1))]


def test_all_ranks_wait_for_the_last() -> None:
    stores, asked = open_stores(3), [threading.Event() for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        # Only a rank that waits asks whether the epoch is over.
        early = [threads.submit(wait_for_ranks, stores[n], n, 3, asked[n].set) for n in (0, 1)]
        assert all(event.wait(30) for event in asked)
        assert not any(meeting.done() for meeting in early)
        wait_for_ranks(stores[2], 2, 3, lambda: False)
        for meeting in early:
            meeting.result()


def test_a_lost_epoch_is_not_waited_for() -> None:
    stores, over = open_stores(2), threading.Event()
    with ThreadPoolExecutor(1) as threads:
        meeting = threads.submit(wait_for_ranks, stores[0], 0, 2, over.is_set)
        over.set()
        with pytest.raises(TransportError, match="was lost"):
            meeting.result()


def test_a_store_whose_host_died_ends_the_meeting() -> None:
    store, port = open_epoch_store("127.0.0.1", TIMEOUT)
    guest = join_epoch_store("127.0.0.1", port, TIMEOUT)
    del store
    with pytest.raises(TransportError, match="store is gone"):
        wait_for_ranks(guest, 1, 2, lambda: False)


def test_the_store_keeps_to_the_ports_that_it_may_have() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(TransportError, match=f"none of {port} to {port} is free"):
            open_epoch_store("127.0.0.1", TIMEOUT, (port, port))
        _store, found = open_epoch_store("127.0.0.1", TIMEOUT, (port, min(port + 50, 65535)))
        assert port < found <= port + 50


def test_a_store_whose_stage_is_gone_is_not_waited_for() -> None:
    """torch would try for longer than the time-out: here, longer than any test may take."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(TransportError, match="cannot reach the epoch's store"):
        join_epoch_store("127.0.0.1", port, timedelta(hours=1))
