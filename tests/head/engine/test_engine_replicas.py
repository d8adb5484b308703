"""An engine of two replicas: what becomes of the ranks of one that has ended. Time and ranks are scripted."""

from __future__ import annotations

import pytest

from ppserve import wire
from ppserve.core.grid import RankGrid
from ppserve.core.request import Request, SamplingParams, StopConditions
from ppserve.core.scheduling.request_queue import RequestQueue
from ppserve.errors import Draining
from ppserve.head.engine.control import Disconnected, Received
from ppserve.head.engine.loop import Engine
from ppserve.head.engine.member import FatalError
from ppserve.head.engine.members import Members
from ppserve.head.engine.replica import Replica
from ppserve.head.engine.streams import OpenRequest
from tests.head.engine.replica_rig import SECOND, ScriptedControl
from tests.head.engine.toy_ranks import ARCH, NUM_BLOCKS, Reader, ToyRules
from tests.hellos import hello as hello_of

GRID = RankGrid(1, 2, 1)
LOADED = wire.Loaded("cpu", 1, 1, 10, 10 * NUM_BLOCKS, "")


def hello(rank: int, weights: str = "") -> wire.Hello:
    return hello_of(rank, GRID.size, ARCH, wire.StageHost("host", "here"), weights=weights)


class Rig:
    """Two replicas of one rank each."""

    def __init__(self, **config: object) -> None:
        self.control, queue = ScriptedControl(), RequestQueue()
        members = [Members(GRID, "here", ToyRules(1, config), self.control, number) for number in range(2)]
        replicas = [Replica(each, self.control, (), lambda: SECOND, queue) for each in members]
        self.engine = Engine(replicas, self.control, (), lambda call: call(), lambda: SECOND)
        self.engine.begin()

    def say(self, rank: int, *messages: wire.FromStage) -> None:
        self.control.arrived += [Received(rank, SECOND, message) for message in messages]
        self.engine.turn()

    def lose(self, rank: int) -> None:
        self.control.arrived.append(Disconnected(rank, "exit"))
        self.engine.turn()

    def form(self, *weights: str) -> None:
        for rank, which in enumerate(weights):
            self.say(rank, hello(rank, which), LOADED, wire.StoreOpened(1, 1), wire.Ready(1))

    @property
    def serving(self) -> list[bool]:
        return [replica.serves for replica in self.engine.replicas]


def test_nothing_is_served_until_every_replica_has_formed() -> None:
    rig = Rig()
    rig.form("")
    opened = OpenRequest(Request("a", (1,), StopConditions(1), SamplingParams()), Reader())
    refused = rig.engine.submit(opened)
    rig.engine.turn()
    with pytest.raises(Draining):
        refused.result(0)
    assert not rig.engine.formed.done()


def test_a_stage_that_comes_back_to_a_replica_that_has_ended_is_told_to_exit() -> None:
    rig = Rig()
    rig.form("", "")
    assert rig.serving == [True, True]
    rig.lose(1)
    rig.say(1, hello(1))
    rig.say(1, wire.Failed("no memory"))
    rig.control.sent.clear()
    rig.lose(1)
    rig.say(1, hello(1))
    assert rig.control.sent == [(1, wire.Shutdown())]
    assert (rig.serving, rig.engine.failed.done()) == ([True, False], False)


def test_a_replica_that_found_other_weights_does_not_serve_and_is_named() -> None:
    rig = Rig()
    rig.form("as published", "trained on")
    reason = "replica 1 on host has other weights in /m, unlike replica 0"
    assert rig.engine.failed.result(0) == FatalError(reason, usage=True)
