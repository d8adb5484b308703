"""Ranks that are threads. Their control plane consists of queues, and each thread runs the loop of a stage."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial

from ppserve import wire
from ppserve.config import ServeConfig
from ppserve.head.engine.control import Disconnected, LossCause, Received
from ppserve.process.environment import RankEnvironment
from ppserve.stage.connecting import ThreadConnector
from ppserve.stage.device import DeviceSetup
from ppserve.stage.link import HeadLink
from ppserve.stage.loop import StageLoop
from ppserve.stage.probe import probe

log = logging.getLogger("ppserve.library")


class LocalControlPlane:
    """Both ends of an `engine.control.ControlPlane`. A rank that fails sends `Failed`."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._arrived: queue.SimpleQueue[Received | None] = queue.SimpleQueue()
        self.links = {rank: HeadLink(partial(self._receive, rank)) for rank in ranks}

    def _receive(self, rank: int, message: wire.FromStage) -> None:
        self._arrived.put(Received(rank, time.monotonic_ns(), message))

    def poll(self, timeout_s: float) -> list[Received | Disconnected]:
        came: list[Received | None] = []
        with suppress(queue.Empty):
            while True:
                came.append(self._arrived.get(timeout=0.0 if came else timeout_s))
        return [message for message in came if message is not None]

    def wake(self) -> None:
        self._arrived.put(None)

    def send(self, ranks: Iterable[int], message: wire.FromHead) -> None:
        for rank in ranks:
            self.links[rank].handle_message(time.monotonic_ns(), message)

    def drop(self, rank: int, cause: LossCause) -> None:
        """End the pipeline, because a thread can be neither ended nor restarted."""
        self._receive(rank, wire.Failed(f"stage {rank} was given up: {cause}"))

    def close(self, goodbye_s: float) -> None:
        """Do nothing: the pipeline that started the threads waits for them."""


def make_stages(config: ServeConfig, world_size: int, control: LocalControlPlane) -> list[threading.Thread]:
    """Make a thread for each rank. Raises UsageError."""
    grid = config.pipeline.grid(world_size)
    connectors = [ThreadConnector() for _ in range(grid.data)]
    threads = []
    for rank, link in control.links.items():
        found = probe(config, RankEnvironment(rank, world_size, rank, world_size))
        connector = connectors[grid.place(rank).replica]
        stage = StageLoop(wire.Start(config, rank, world_size), found, link, connector)
        thread = threading.Thread(
            target=_run_stage, args=(stage, found.setup, link), name=grid.name(rank), daemon=True
        )
        threads.append(thread)
    return threads


def _run_stage(stage: StageLoop, setup: DeviceSetup, link: HeadLink) -> None:
    """Run a stage in its thread. An unexpected error ends the pipeline, with the error's text."""
    try:
        setup.bind_this_thread()
        stage.run()
    except BaseException as error:
        log.exception("a stage failed")
        link.send(wire.Failed(f"{type(error).__name__}: {error}"))
        stage.leave_epoch()  # neighbours stop waiting for it
    finally:
        # The pipeline keeps the link alive; the link must not keep the stage alive, with its memory.
        link.start(lambda _epoch: None)
