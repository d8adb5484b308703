"""A launcher, ranks and stages that are forked, where torchrun and keepers start fresh interpreters.

Importing this module imports what head and stages import, once, and may fork from then on. Here a rank's
keeper forks its stages itself, where a real one has a fork server, `python -m ppserve.stage`; nothing else
differs. A stage is a child of its keeper, and has its own end of a socket and no other descriptor. It dies with
its keeper, by the kernel's doing, and its keeper waits for it and kills it.

The name of a process (`comm`) tells what it is, since its command line is that of the process that imported.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import gc
import logging
import os
import resource
import signal
import sys
import threading
import traceback
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from ppserve.process import stage_process
from ppserve.process.lifetime import die_with_parent

assert "ppserve.process.keeper" not in sys.modules, "its stages would be fresh interpreters"

STAGE, RANK = "ppserve.stage", "ppserve.rank"
"""Names of processes. A rank's number follows."""

_SWITCH_INTERVAL_S = sys.getswitchinterval()
_parents_streams: list[object] = []


class ForkingKeeper(stage_process.ForkServer):
    """The keeper's own process, which needs no imports."""

    _pid: int | None = None

    def request_stage(self, stage_end: int) -> None:
        keeper, self._pid = os.getpid(), None
        pid = os.fork()
        if pid == 0:
            try:
                _be_stage(stage_end, keeper)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        self._pid = pid

    def reap_stage(self) -> int:
        assert self._pid is not None
        pid, self._pid = self._pid, None
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def kill(self) -> None:
        if self._pid is not None:
            os.kill(self._pid, signal.SIGKILL)

    def close(self) -> int:
        return 0


stage_process.ForkServer = ForkingKeeper  # type: ignore[misc]
# Read at import. Otherwise gRPC would stop its threads while the head forks, and start them anew in the stage.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

# From here on imports find that class. All that head and stages import, also what they import later than others.
import torch.distributed.run  # noqa: E402

import ppserve.cli.check  # noqa: E402
import ppserve.cli.main  # noqa: E402
import ppserve.cli.serve  # noqa: E402
import ppserve.head.app  # noqa: E402
import ppserve.stage.__main__ as stage_main  # noqa: E402
import ppserve.stage.connecting  # noqa: E402
import ppserve.stage.link  # noqa: E402
import ppserve.stage.loop  # noqa: E402
import ppserve.stage.probe  # noqa: E402
from ppserve.core.architecture import Split  # noqa: E402
from ppserve.errors import RequestError, ReshapeFailed  # noqa: E402
from tests.forking import RESHAPES  # noqa: E402


class ReshapableHead(ppserve.head.app.HeadProcess):
    """The head, whose layers can be divided anew by hand, which no door of a server does.

    Where the variable `RESHAPES` has the path of a socket, the head takes a line such as `3,5` there, and answers
    with the number of the epoch that has formed with these layers, or with the reason why none has.
    """

    async def _serve(self, metrics_port: int) -> None:
        if (path := os.environ.get(RESHAPES)) is None:
            await super()._serve(metrics_port)
            return
        async with await asyncio.start_unix_server(self._reshape, path):
            await super()._serve(metrics_port)

    async def _reshape(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer: object
        try:
            split = Split.parse((await reader.readline()).decode())
            answer = await asyncio.wrap_future(self._engine.reshape(0, split))
        except (RequestError, ReshapeFailed) as error:
            answer = f"{type(error).__name__}: {error}"
        writer.write(f"{answer}\n".encode())
        writer.close()


ppserve.head.app.HeadProcess = ReshapableHead  # type: ignore[misc]

# What is imported stays: no collector writes to these pages, which all processes share.
gc.freeze()


def run_torchrun(arguments: list[str], environment: Mapping[str, str], log: Path) -> int:
    """`python -m torch.distributed.run` with these arguments. Its ranks are fresh interpreters."""
    _be_launcher(environment, log)
    torch.distributed.run.main(arguments)
    return 0


def launch(what: tuple[int, Sequence[str]], environment: Mapping[str, str], log: Path) -> int:
    """Starts so many ranks of a server with these flags, as torchrun does. When one fails, or a SIGTERM comes, the
    others are told to end. Returns 0 when all ended well."""
    _be_launcher(environment, log)
    num_ranks, flags = what
    os.environ |= {"TORCHELASTIC_RUN_ID": str(uuid.uuid4()), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    running: set[int] = set()

    def end(*_: object) -> None:
        for pid in running:
            os.kill(pid, signal.SIGTERM)

    # A rank that has just been forked would take the launcher's handler for its own.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    for number in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            _be_rank(number, flags)
        running.add(pid)
    signal.signal(signal.SIGTERM, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    worst = 0
    while running:
        # Not reaped before it is forgotten: the handler may come at any moment.
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        running.discard(ended.si_pid)
        code = abs(os.waitstatus_to_exitcode(os.waitpid(ended.si_pid, 0)[1]))
        if code and not worst:
            end()
        worst = max(worst, code)
    return worst


def _be_launcher(environment: Mapping[str, str], log: Path) -> None:
    """All that it and its ranks say goes to the log."""
    die_with_parent()
    _close_all_but()
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for fd in (1, 2):
        os.dup2(output, fd)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)


def _be_rank(number: int, flags: Sequence[str]) -> NoReturn:
    """`python -m ppserve`, as torchrun starts it."""
    code: object = 1
    try:
        _be_new(f"{RANK}{number}")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
        sys.argv = ["ppserve", *flags]
        ppserve.cli.main.main()
    except SystemExit as end:
        code = 0 if end.code is None else end.code
    except BaseException:
        traceback.print_exc()
    finally:
        # What may hold an interpreter up at its end, which is the rest of `sys.exit`.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def _be_stage(life: int, keeper: int) -> NoReturn:
    """Called in any thread of the keeper's process."""
    # Objects of the keeper are never collected: those with descriptors would close others of the same number.
    gc.freeze()
    _be_new(STAGE)
    stdin = os.open(os.devnull, os.O_RDONLY)
    os.dup2(stdin, 0)
    _close_all_but(life)
    # As the fork server has set them for its stages.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stage_main.run_and_exit(lambda: stage_main.run_stage_process(life, keeper))


def _be_new(name: str) -> None:
    """What `exec` and the start of an interpreter do: signals and streams are those of a new process."""
    signal.set_wakeup_fd(-1)
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE}:
        if callable(signal.getsignal(signum)):
            signal.signal(signum, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    # Other threads may hold locks of the parent's streams: nobody writes to those, nor closes them.
    _parents_streams.extend((sys.stdout, sys.stderr))
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.stream = sys.stderr
    pr_set_name = 15
    ctypes.CDLL(None).prctl(pr_set_name, name.encode(), 0, 0, 0)


def _close_all_but(kept: int = 2) -> None:
    """Close all descriptors beyond standard input, output and error, but this one."""
    os.closerange(3, kept)
    os.closerange(max(kept + 1, 3), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
