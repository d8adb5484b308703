"""The ranks of the tour: how they are started, and how they exchange values and print."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist

import parallel_state
from ppserve.library import Frames, Transport, create_transport
from ppserve.process.interrupts import exit_at_signals
from ppserve.process.lifetime import ending_with_us, signals_blocked
from tour.pictures import Pictures
from tour.rounds import ROUGH, median, spread

_TIMEOUT, _PAUSE_WITHIN = timedelta(seconds=300), timedelta(days=1)
_LOOK_S = 0.5
_ENDS_WITHIN_S = 40.0
_LEFT_TO_STARTER = (signal.SIGHUP, signal.SIGINT)
_BUSY = 0.15

R = TypeVar("R")


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_cores() -> float:
    """Return how many of the machine's cores other programs keep busy; 0 if it is less than a share of _BUSY. This
    takes _LOOK_S seconds, during which the tour must not compute."""
    share = psutil.cpu_percent(_LOOK_S) / 100
    return share * (psutil.cpu_count() or 1) if share >= _BUSY else 0.0


def start_ranks(num_ranks: int, command: Sequence[str]) -> int:
    """Run a command once per rank on this host, as torchrun would, and return an exit code.

    If one rank fails, the others are ended, because they would wait for it. All ranks are ended at the first
    signal that ends this process. If this process is killed, the kernel ends them.
    """
    exit_at_signals()
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    # Ranks meet in this store; it lives here, so no rank has to be first.
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    common |= {"WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": "1"}
    command = ending_with_us(command, by=signal.SIGTERM)
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        with signals_blocked(_LEFT_TO_STARTER):
            for rank in range(num_ranks):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                ranks.append(subprocess.Popen(command, env={**os.environ, **common, **own}))
        while True:
            codes = [rank.poll() for rank in ranks]
            if any(codes) or None not in codes:
                return max(abs(code or 0) for code in codes)
            time.sleep(0.05)
    finally:
        for process in ranks:  # the first ends its server, which the others wait for
            if process.poll() is None:
                process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_ENDS_WITHIN_S)
            process.kill()
            process.wait()
        del store


def obey_starter() -> None:
    """Let only `start_ranks` end this rank, which it has started: block the signals that it answers itself. In
    rank 0 the first SIGTERM raises KeyboardInterrupt, so that its server ends in order. Under torchrun, do
    nothing."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_STARTER)
    if os.environ["RANK"] == "0":
        signal.signal(signal.SIGTERM, _interrupt_once)


def _interrupt_once(_number: int, _frame: object) -> None:
    # The kernel sends a further one for each thread of a starter that is killed.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


class Tour:
    """One rank of the tour: its number, its device, its exchanges with the other ranks, and its output."""

    def __init__(self, options: Namespace) -> None:
        self.options = options
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        num_gpus = 0 if options.force_cpu else torch.cuda.device_count()
        self.device = torch.device("cuda", self.rank) if num_gpus >= self.size else torch.device("cpu")
        on_cpus = "shm" if sys.platform == "linux" else "gloo"
        self.transport_name = "nccl" if self.device.type == "cuda" else on_cpus
        torch.set_num_threads(max(1, num_cores() // self.size))
        self._store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            wait_for_workers=False,
            timeout=_PAUSE_WITHIN if options.pause else _TIMEOUT,
        )
        if os.environ["MASTER_ADDR"] in ("127.0.0.1", "localhost"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl",
            store=dist.PrefixStore("tour/groups", self._store),
            rank=self.rank,
            world_size=self.size,
            timeout=_TIMEOUT,
        )
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=self.size)
        self._num_exchanges = 0
        self._spreads: list[float] = []
        self._has_progress = False
        self.pictures = Pictures(options.plot) if options.plot is not None and self.rank == 0 else None

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def say(self, text: str = "") -> None:
        """Print a line. Only rank 0 prints; other ranks do nothing."""
        self.write(f"{text}\n")

    def write(self, text: str) -> None:
        """Print a text without a line's end. Only rank 0 prints."""
        if self.rank == 0:
            self._erase_progress()
            print(text, end="", flush=True)

    def progress(self, text: str) -> None:
        """Show what is measured now, on a line that the next text replaces. It is shown only on a terminal."""
        if self.rank == 0 and sys.stderr.isatty():
            self._erase_progress()
            self._has_progress = True
            print(f"  ... {text}", end="", file=sys.stderr, flush=True)

    def _erase_progress(self) -> None:
        if self._has_progress:
            self._has_progress = False
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def median(self, runs: Sequence[R], figure_of: Callable[[R], float]) -> R:
        """Return the median run of several rounds, and remember the rounds' spread until `warn_if_rough`."""
        self._spreads.append(spread([figure_of(run) for run in runs]))
        return median(runs, figure_of)

    def warn_if_rough(self) -> None:
        """Print a warning if the rounds of this part of the tour differ by more than ROUGH."""
        worst, self._spreads = max(self._spreads, default=0.0), []
        if worst > ROUGH:
            self.say(f"  Take these figures as rough: rounds of the same differ by up to {worst:.0%}, as they do")
            self.say("  where other programs run on this machine.\n")

    def pause(self) -> None:
        """Wait for Enter. If standard input has ended, go on at once."""
        if self.rank == 0:
            self.write("\n[Enter goes on]")
            with contextlib.suppress(EOFError):
                input()
        self.exchange("on")

    def explain(self, text: str) -> None:
        """Print a paragraph, wrapped at 100 columns."""
        self.say("\n" + textwrap.fill(" ".join(text.split()), 100) + "\n")

    def title(self, number: int, text: str) -> None:
        self.say(f"\n{number}. {text}\n{'-' * (len(text) + 3)}")

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order (an all-gather of JSON). All ranks must call this. It is
        a barrier too."""
        self._num_exchanges += 1
        here = f"tour/exchange/{self._num_exchanges}/"
        self._store.set(here + str(self.rank), json.dumps(value))
        return [json.loads(self._store.get(here + str(rank))) for rank in range(self.size)]

    def say_each(self, text: str) -> None:
        """Print one line for every rank, in their order. All ranks must call this."""
        for line in self.exchange(text):
            self.say(f"  {line}")

    def connect(self, width: int, kind: str | None = None) -> Transport:
        """Connect this rank to its neighbours, for hidden states of this width. kind: a transport's name; None:
        the fastest one that works here. All ranks must call this."""
        frames = Frames(width, torch.float32, max_rows=1024, depth=2 * self.size, device=self.device)
        name = kind or self.transport_name
        transport = create_transport(name, frames, parallel_state.get_pp_group())
        transport.warm_up()
        return transport

    def close(self) -> None:
        """Wait until all ranks are done, then leave their groups."""
        self.exchange("done")
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
