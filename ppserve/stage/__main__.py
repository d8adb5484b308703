"""The fork server that a keeper starts, `python -m ppserve.stage REQUESTS_FD KEEPER_PID`, and its stages.

Here is what concerns the process and not the stage: imports, signals, exit codes, and finding the head.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from ppserve import wire
from ppserve.errors import UsageError
from ppserve.process.environment import RankEnvironment
from ppserve.process.handshake import connect_to_head
from ppserve.process.identity import name_process
from ppserve.process.lifetime import ENDING_SIGNALS, EXIT_HEAD_GONE, EXIT_USAGE, die_with_parent, ignore_signals
from ppserve.process.log import flush_streams, never_wait_for_readers, set_up_logging
from ppserve.process.network import find_route
from ppserve.process.stage_process import EXIT_CODE, FORK, REAP, StageLine

if TYPE_CHECKING:
    from ppserve.stage.probe import ProbeResult

log = logging.getLogger("ppserve.stage")

_SIGN_OF_LIFE_S = 0.5
_CONNECT_WITHIN_S = 60.0


def main() -> int:
    """Fork a stage process whenever the keeper asks for one. This returns only in the stage processes, with their
    exit codes."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    keeper_pid = int(sys.argv[2])
    die_with_parent(keeper_pid)
    # Head and keeper decide when this process and its stages end.
    ignore_signals(ENDING_SIGNALS)
    name_process("ppserve.forks")
    server_pid = os.getpid()
    while True:
        request, fds, _, _ = socket.recv_fds(requests, 1, 1)
        if request == REAP:
            requests.sendall(EXIT_CODE.pack(os.waitstatus_to_exitcode(os.wait()[1])))
            continue
        if request != FORK:
            os._exit(EXIT_HEAD_GONE)  # the keeper has ended
        (keeper_fd,) = fds
        _import(keeper_fd)
        if os.fork() == 0:
            requests.close()
            return run_stage_process(keeper_fd, server_pid)
        os.close(keeper_fd)


def _import(keeper_fd: int) -> None:
    """Import all that a stage needs, which takes seconds. Afterwards no thread is left, because a fork would not
    copy it. If an import fails, each stage finds that out again and tells the head."""
    # The collector should not look at imported objects, and so write to memory that stages share.
    gc.disable()
    is_done = threading.Event()
    thread = threading.Thread(target=_send_signs_of_life, args=(keeper_fd, is_done))
    thread.start()
    try:
        with contextlib.suppress(UsageError, PermissionError):
            from ppserve.stage import connecting, link, loop, probe  # noqa: F401
    finally:
        is_done.set()
        thread.join()
    gc.freeze()


def run_stage_process(keeper_fd: int, parent_pid: int) -> int:
    """Run a stage in this process, a child of `parent_pid`, and return its exit code.

    keeper_fd: a socket to the keeper, which sends the `Start` and reads lines (`StageLine`).
    """
    die_with_parent(parent_pid)
    name_process("ppserve.stage")
    gc.enable()
    _write_line(keeper_fd, f"{StageLine.FORKED} {os.getpid()}")
    forever = threading.Event()
    threading.Thread(target=_send_signs_of_life, args=(keeper_fd, forever), name="life", daemon=True).start()
    start = _read_start(keeper_fd)
    never_wait_for_readers()
    set_up_logging(start.config.server, start.config.pipeline.grid(start.world_size).name(start.rank))
    log.info("process %d", os.getpid())
    _write_line(keeper_fd, StageLine.STARTED)
    found = _probe(start, lambda words: _write_line(keeper_fd, f"{StageLine.DOING} {words}"))
    return _find_head(start, found, keeper_fd)


def _find_head(start: wire.Start, found: ProbeResult | UsageError, keeper_fd: int) -> int:
    """Connect to the head, and run the stage. Return the exit code. This comes last, because a download or a
    measurement may take long."""
    assert start.head_endpoint is not None
    try:
        connection = connect_to_head(start.head_endpoint, start.rank, _CONNECT_WITHIN_S)
    except (OSError, UsageError) as error:
        log.error("cannot reach the head: %s", error)
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_HEAD_GONE
    _write_line(keeper_fd, StageLine.CONNECTED)
    return _serve(start, found, connection, keeper_fd)


def _probe(start: wire.Start, report: Callable[[str], None]) -> ProbeResult | UsageError:
    environment = RankEnvironment.from_environ() or RankEnvironment(start.rank, start.world_size, 0, 1)
    try:
        from ppserve.stage.probe import probe_and_measure
    except (UsageError, PermissionError) as error:
        return UsageError(f"a stage cannot start on {socket.gethostname()}: {error}")
    try:
        return probe_and_measure(start.config, environment, report)
    except UsageError as error:
        return error


def _serve(start: wire.Start, found: ProbeResult | UsageError, connection: socket.socket, keeper_fd: int) -> int:
    """Run the stage, or tell the head of a mistake. Return the exit code."""
    try:
        if isinstance(found, UsageError):
            raise found
        route = find_route(connection, start.config.network)
    except UsageError as error:
        # If the connection is closed, another stage has told the head before.
        with contextlib.suppress(OSError):
            connection.sendall(wire.encode(wire.Failed(str(error))))
        return EXIT_USAGE
    from ppserve.stage.connecting import ProcessConnector
    from ppserve.stage.link import SocketHeadLink
    from ppserve.stage.loop import StageLoop

    link = SocketHeadLink(connection, end=os._exit)
    stage = StageLoop(start, found, link, ProcessConnector(start.config.network.stage_ports), route)
    return stage.run(report=lambda line: _write_line(keeper_fd, line))


def _read_start(keeper_fd: int) -> wire.Start:
    reader = wire.FrameReader(wire.Start)
    while received := os.read(keeper_fd, 1 << 16):
        for message in reader.feed(received):
            assert isinstance(message, wire.Start)
            return message
    os._exit(EXIT_HEAD_GONE)


def _write_line(keeper_fd: int, line: str) -> None:
    os.write(keeper_fd, f"{line}\n".encode())


def _send_signs_of_life(keeper_fd: int, is_done: threading.Event) -> None:
    """Send the keeper an empty line every half second, which shows that this process is not frozen."""
    while True:
        try:
            _write_line(keeper_fd, "")
        except OSError:
            os._exit(EXIT_HEAD_GONE)
        if is_done.wait(_SIGN_OF_LIFE_S):
            return


def run_and_exit(run: Callable[[], int]) -> NoReturn:
    """Call `run` and exit with its code, or 1 if it raises. `sys.exit` could be held up by threads of torch and
    NCCL."""
    try:
        code = run()
    except Exception:
        log.exception("this stage ends")
        code = 1
    logging.shutdown()
    flush_streams()
    os._exit(code)


if __name__ == "__main__":
    run_and_exit(main)
