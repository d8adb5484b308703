"""`ppserve serve --stages N` from a plain shell: this runs torchrun's agent in this process, without its command
line.

torchrun's own report of a failed rank is not printed, because the rank has written a line that says what is wrong.
The rank's exit code becomes the command's.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

import psutil

from ppserve.process.environment import LAUNCHER_GRACE, number_of
from ppserve.process.lifetime import HEAD_SIGNALS, name_run

# It is longer than keepers wait before they kill a stage that does not end.
_ENDING_S = 15
# The variable with the signals that torchrun forwards and that end ranks. SIGHUP is one of them by default.
_SIGNALS_THAT_END = "TORCHELASTIC_SIGNALS_TO_HANDLE"


def _make_rendezvous(parameters: Any) -> Any:
    """Make a rendezvous handler whose store is in memory. torchrun's `--standalone` would open one to the
    network."""
    from torch.distributed import HashStore
    from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    class LocalRendezvous(StaticTCPRendezvous):
        def get_backend(self) -> str:
            return "ppserve"

        @property
        def use_agent_store(self) -> bool:
            return False

        def next_rendezvous(self) -> RendezvousInfo:
            return RendezvousInfo(HashStore(), 0, 1, no_port)

    # Ranks of one host find the head at a Unix socket (`process.head_endpoint`).
    no_port = RendezvousStoreInfo("127.0.0.1", 0)
    return LocalRendezvous("127.0.0.1", 0, 0, 1, parameters.run_id, 0)


def run_ranks(num_ranks: int, arguments: Sequence[str], shutdown_timeout_s: float) -> int:
    """Start this command once for each rank on this host, wait, and return an exit code. Raises LauncherError.
    shutdown_timeout_s: how long streams may take to finish after a SIGTERM; ranks get a little more."""
    os.environ[LAUNCHER_GRACE] = str(number_of(LAUNCHER_GRACE, math.ceil(shutdown_timeout_s) + _ENDING_S))
    # If it is not set, torchrun sets it and prints a warning. Stages choose their threads themselves.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    gc.disable()  # imported modules stay, so collecting among them is wasted time
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.run import parse_args, run

    gc.enable()
    logging.disable(logging.CRITICAL)
    _hand_on_signals()
    _hold_back_from_ranks(signal.SIGINT, *HEAD_SIGNALS)
    rendezvous_handler_registry.register("ppserve", _make_rendezvous)
    try:
        run(parse_args(_command(num_ranks, arguments)))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 1
    except SignalException:
        # This process got a signal; the ranks got it too, and have ended.
        return 0
    return 0


def _command(num_ranks: int, arguments: Sequence[str]) -> list[str]:
    return [
        *("--nnodes=1", f"--nproc-per-node={num_ranks}", "--rdzv-backend=ppserve", f"--rdzv-id={name_run()}"),
        # Without a place for logs, torchrun makes a directory for temporary files, and leaves it behind.
        *("--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", f"--log-dir={os.devnull}", "-m", "ppserve"),
        *(arguments if arguments[:1] == ["serve"] else ["serve", *arguments]),
    ]


def _hand_on_signals() -> None:
    """Hand SIGHUP and SIGUSR1 on to the ranks. The SIGHUP of a closed terminal ends the server, unless it was
    started with `nohup`."""
    os.environ[_SIGNALS_THAT_END] = "SIGTERM,SIGINT,SIGQUIT"
    ends_with_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and _has_terminal()

    def on_signal(signum: int, _frame: object) -> None:
        if signum == signal.SIGHUP and ends_with_terminal and not _has_terminal():
            signal.raise_signal(signal.SIGTERM)
            return
        for rank in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                rank.send_signal(signum)

    for signum in (signal.SIGHUP, signal.SIGUSR1):
        signal.signal(signum, on_signal)


def _hold_back_from_ranks(*signals: signal.Signals) -> None:
    """Block these signals in this thread, so that ranks begin with them blocked: none ends a rank that has no
    handlers yet. Another thread takes them for this process, whose handlers run as before."""

    def take() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        threading.Event().wait()

    threading.Thread(target=take, name="signals", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)


def _has_terminal() -> bool:
    with contextlib.suppress(OSError):
        os.close(os.open(os.ctermid(), os.O_RDWR | os.O_NOCTTY))
        return True
    return False
