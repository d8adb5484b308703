"""Puts the engine together, for the server and for the library."""

from __future__ import annotations

import time

from ppserve.config import ServeConfig
from ppserve.core.scheduling.request_queue import RequestQueue
from ppserve.head.engine.control import ControlPlane
from ppserve.head.engine.loop import Engine
from ppserve.head.engine.members import Members
from ppserve.head.engine.observer import Observers
from ppserve.head.engine.placement import Placement
from ppserve.head.engine.replica import Replica
from ppserve.head.engine.streams import HandOver
from ppserve.process.environment import this_machine


def build_engine(
    config: ServeConfig,
    world_size: int,
    control: ControlPlane,
    hand_over: HandOver,
    observers: Observers = (),
    in_process: bool = False,
) -> Engine:
    """An engine of as many replicas as the configuration says. Its thread is not started.

    in_process: stages are threads of this process.
    """
    grid = config.pipeline.grid(world_size)
    machine, rules, request_queue = this_machine(), Placement(config, in_process), RequestQueue()
    clock = time.monotonic_ns
    pipelines = [Members(grid, machine, rules, control, number) for number in range(grid.data)]
    replicas = [Replica(members, control, observers, clock, request_queue) for members in pipelines]
    return Engine(replicas, control, observers, hand_over, clock)
