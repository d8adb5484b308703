"""Where stages find each other, without stages."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest

from ppserve.errors import TransportError
from ppserve.stage.rendezvous import join_epoch_store, meet, open_epoch_store

# Longer than any test may take.
FOR_EVER = timedelta(hours=1)


@pytest.mark.timeout(60)
def test_a_store_whose_stage_is_gone_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(TransportError, match="cannot reach the epoch's store"):
        join_epoch_store("127.0.0.1", port, FOR_EVER)


@pytest.mark.timeout(60)
def test_two_meet_and_one_alone_waits_until_the_epoch_is_over() -> None:
    store, port = open_epoch_store("127.0.0.1", FOR_EVER)
    looks = iter([False, False, True])
    with pytest.raises(TransportError, match="before every stage had come"):
        meet(store, 0, 2, lambda: next(looks))
    other = join_epoch_store("127.0.0.1", port, FOR_EVER)
    meet(other, 1, 2, lambda: False)
    meet(store, 0, 2, lambda: False)
