"""A stage process, as its keeper starts it: `python -m ppserve.stage LIFE_FD KEEPER_PID` < Start frame.

What belongs to the process and not to the stage is here: signals, torch's threads, exit codes, finding the head.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from ppserve import wire
from ppserve.errors import UsageError
from ppserve.process.environment import EXIT_HEAD_GONE, EXIT_USAGE, RankEnvironment, die_with_parent
from ppserve.process.greeting import connect_to_head
from ppserve.process.interfaces import ONE_HOST, find_route, other_ports
from ppserve.process.logs import set_up_logging, survive_full_disks

log = logging.getLogger("ppserve.stage")

_SIGN_OF_LIFE_S = 0.5
_CONNECT_WITHIN_S = 60.0


def main() -> int:
    life_fd, keeper_pid = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(keeper_pid)
    # The head and the keeper decide when this process ends, also while it waits as a spare.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_show_life, args=(life_fd,), name="life", daemon=True).start()
    # Slow (torch), which is why a spare process does it while it waits for its start. What is imported stays, so
    # the collector need not look at it, now or during a step.
    gc.disable()
    from ppserve.stage import calibrate
    from ppserve.stage.link import HeadLink
    from ppserve.stage.loop import Findings, StageLoop
    from ppserve.stage.wiring import ProcessGroupWiring

    gc.freeze()
    gc.enable()
    start = _read_start()
    survive_full_disks()
    grid = start.config.pipeline.grid(start.world_size)
    set_up_logging(start.config.log, start.config.pipeline.rank_name(start.rank, start.world_size))
    log.info("process %d", os.getpid())
    assert start.meeting is not None
    os.write(life_fd, b"started\n")
    environment = RankEnvironment.from_environ() or RankEnvironment(start.rank, start.world_size, 0, 1)
    mistake = ""
    try:
        # Before connecting, because it may take long (a download, a measurement), and the head is waiting.
        found = Findings.of(start.config, environment)
        found.compute.occupy()
        tensor = grid.place(start.rank).tensor
        costs = calibrate.costs_for_split(start.config, grid.pipeline, found.checkpoint, found.compute, tensor)
        speed = calibrate.costs_for_shape(start.config, start.world_size, found.checkpoint, found.compute)
        found = replace(found, costs=costs, speed=speed)
    except UsageError as error:
        mistake = str(error)
    try:
        connection = connect_to_head(start.meeting, start.rank, _CONNECT_WITHIN_S)
    except OSError as error:
        log.error("cannot reach the head: %s", error)
        return EXIT_HEAD_GONE
    except UsageError as error:
        log.error("%s", error)
        return EXIT_USAGE
    os.write(life_fd, b"connected\n")
    try:
        route = find_route(connection, start.config.network)
    except UsageError as error:
        mistake = mistake or str(error)
    if mistake:
        # A closed connection means the head has heard of the mistake from another stage already.
        with contextlib.suppress(OSError):
            connection.sendall(wire.encode(wire.GaveUp(mistake)))
        return EXIT_USAGE
    # When the head is gone nothing is left to do.
    open_link = functools.partial(HeadLink, connection, on_lost=lambda: os._exit(EXIT_HEAD_GONE))
    ports = start.config.network.stage_ports
    if route != ONE_HOST and (problem := other_ports(ports)):
        log.warning("%s", problem)
    stage = StageLoop(start, found, open_link, ProcessGroupWiring(ports), route)
    return stage.run(tell=lambda what: os.write(life_fd, f"{what}\n".encode()))


def _read_start() -> wire.Start:
    reader = wire.FrameReader(wire.FromKeeper)
    while True:
        received = os.read(0, 1 << 16)
        if not received:
            os._exit(EXIT_HEAD_GONE)
        for message in reader.feed(received):
            assert isinstance(message, wire.Start)
            return message


def _show_life(life_fd: int) -> None:
    """A byte now and then tells the keeper that this process is not frozen. Nobody reads those of a spare:
    they wait in the pipe, and once that is full this thread waits too, until the spare is called upon."""
    while True:
        try:
            os.write(life_fd, b"\n")
        except OSError:
            os._exit(EXIT_HEAD_GONE)
        time.sleep(_SIGN_OF_LIFE_S)


def run_and_exit(run: Callable[[], int]) -> NoReturn:
    """Ends this process with the code that `run` returns, or with 1 where it raises.

    Never by way of the interpreter's own end: threads of torch, gloo and NCCL linger, and after an error some
    would hold it up for ever.
    """
    try:
        code = run()
    except Exception:
        log.exception("this stage ends")
        code = 1
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run_and_exit(main)
