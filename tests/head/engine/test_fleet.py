"""The fleet: what becomes of the ranks of a replica that is gone for good. Time and ranks are scripted."""

from __future__ import annotations

from msgspec import structs

from ppserve import wire
from ppserve.core.grid import RankGrid
from ppserve.core.scheduling.request_queue import RequestQueue
from ppserve.head.engine.control import Disconnected, Received
from ppserve.head.engine.fleet import Fleet
from ppserve.head.engine.member import FatalError
from ppserve.head.engine.members import Members
from ppserve.head.engine.replica import Replica
from ppserve.head.engine.watcher import Watcher
from tests.head.engine.replica_rig import SECOND, ScriptedControl
from tests.head.engine.toy_ranks import ARCH, NUM_BLOCKS, ToyRules

GRID = RankGrid(1, 2, 1)
LOADED = wire.Loaded("cpu", 1, 1, 10, 10 * NUM_BLOCKS, "")


def hello(rank: int) -> wire.Hello:
    return wire.Hello(rank, GRID.size, "host", "/m", ARCH, "float32", None, False, None, "here")


def two_unformed(control: ScriptedControl) -> Fleet:
    request_queue, rules = RequestQueue(), ToyRules(1, {})
    members = [Members(GRID, "here", rules, control, number) for number in range(2)]
    replicas = [Replica(each, control, Watcher(), lambda: SECOND, request_queue) for each in members]
    fleet = Fleet(replicas, control, lambda: SECOND)
    fleet.start()
    return fleet


def two_replicas(control: ScriptedControl) -> Fleet:
    """Both serve."""
    fleet = two_unformed(control)
    for rank in range(2):
        for message in (hello(rank), LOADED, wire.StoreOpened(1, 1), wire.Ready(1)):
            fleet.take(Received(rank, SECOND, message))
    assert [replica.serves for replica in fleet.replicas] == [True, True]
    return fleet


def test_a_stage_that_comes_back_to_a_replica_that_is_gone_for_good_is_told_to_end() -> None:
    control = ScriptedControl()
    fleet = two_replicas(control)
    assert fleet.take(Disconnected(1, "exit")) == []
    assert fleet.take(Received(1, SECOND, hello(1))) == []
    assert fleet.take(Received(1, SECOND, wire.Failed("no memory"))) == [], "the other replica goes on"
    control.sent.clear()
    assert fleet.take(Disconnected(1, "exit")) == []
    assert fleet.take(Received(1, SECOND, hello(1))) == []
    assert control.sent == [(1, wire.Shutdown())]
    assert [replica.serves for replica in fleet.replicas] == [True, False]


def test_a_replica_that_found_other_weights_does_not_serve_and_is_named() -> None:
    control, events = ScriptedControl(), []
    fleet = two_unformed(control)
    for rank, weights in enumerate(("as published", "trained on")):
        greeting = structs.replace(hello(rank), weights=weights)
        for message in (greeting, LOADED, wire.StoreOpened(1, 1), wire.Ready(1)):
            events += fleet.take(Received(rank, SECOND, message))
    assert events == [FatalError("replica 1 on host has other weights than replica 0", usage=True)]


def test_a_replica_that_comes_back_with_other_weights_is_gone_for_good_and_the_other_goes_on() -> None:
    control = ScriptedControl()
    fleet = two_replicas(control)
    fleet.take(Disconnected(1, "exit"))
    assert fleet.take(Received(1, SECOND, structs.replace(hello(1), weights="trained on"))) == []
    assert [replica.serves for replica in fleet.replicas] == [True, False]
    assert (1, wire.Shutdown()) in control.sent
