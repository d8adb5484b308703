"""The ranks of the tour: started, numbered, speaking in turn."""

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
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_cores() -> float:
    """How many cores other programs keep busy, of the whole machine. Takes a moment, in which nobody may compute
    here; 0 where they leave it in peace."""
    share = psutil.cpu_percent(_LOOK_S) / 100
    return share * (psutil.cpu_count() or 1) if share >= _BUSY else 0.0


def start_ranks(num_ranks: int, command: Sequence[str]) -> int:
    """Runs a command once per rank on this host, as torchrun would, and returns an exit code.

    When one rank fails the others are ended: they would wait for it. So are all at the first signal that ends this
    process, and by the kernel when it is killed.
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
    """Leave it to the starter when this rank of `start_ranks` ends. In the first rank SIGTERM raises
    KeyboardInterrupt, so that its server ends in order."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_STARTER)
    if os.environ["RANK"] == "0":
        signal.signal(signal.SIGTERM, signal.default_int_handler)


class Tour:
    """This rank's part in the tour: who it is, where it computes, and how the ranks talk."""

    def __init__(self, options: Namespace) -> None:
        self.options = options
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        num_gpus = 0 if options.force_cpu else torch.cuda.device_count()
        self.device = torch.device("cuda", self.rank) if num_gpus >= self.size else torch.device("cpu")
        self.transport = "nccl" if self.device.type == "cuda" else "shm" if sys.platform == "linux" else "gloo"
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
        self._num_told = 0
        self._spreads: list[float] = []
        self._has_progress = False
        self.pictures = Pictures(options.plot) if options.plot is not None and self.rank == 0 else None

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def say(self, text: str = "") -> None:
        """Rank 0 speaks for all."""
        self.write(f"{text}\n")

    def write(self, text: str) -> None:
        """Rank 0 writes this, and ends no line."""
        if self.rank == 0:
            self._erase_progress()
            print(text, end="", flush=True)

    def progress(self, text: str) -> None:
        """What is measured at the moment, on a line that the next text replaces; a terminal alone shows it."""
        if self.rank == 0 and sys.stderr.isatty():
            self._erase_progress()
            self._has_progress = True
            print(f"  ... {text}", end="", file=sys.stderr, flush=True)

    def _erase_progress(self) -> None:
        if self._has_progress:
            self._has_progress = False
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def median(self, runs: Sequence[R], figure_of: Callable[[R], float]) -> R:
        """The median run of several rounds. How far the rounds are apart is remembered until `warn_if_rough`."""
        self._spreads.append(spread([figure_of(run) for run in runs]))
        return median(runs, figure_of)

    def warn_if_rough(self) -> None:
        """Say so where the rounds of a part differ much."""
        worst, self._spreads = max(self._spreads, default=0.0), []
        if worst > ROUGH:
            self.say(f"  Take these figures as rough: rounds of the same differ by up to {worst:.0%}, as they do")
            self.say("  where other programs run on this machine.\n")

    def pause(self) -> None:
        """Wait for Enter. Where nobody can press it, go on."""
        if self.rank == 0:
            self.write("\n[Enter goes on]")
            with contextlib.suppress(EOFError):
                input()
        self.tell("on")

    def explain(self, text: str) -> None:
        """A paragraph, wrapped."""
        self.say("\n" + textwrap.fill(" ".join(text.split()), 100) + "\n")

    def title(self, number: int, text: str) -> None:
        self.say(f"\n{number}. {text}\n{'-' * (len(text) + 3)}")

    def tell(self, value: Any) -> list[Any]:
        """Every rank says something; all hear everybody, in the order of ranks. It is a barrier too."""
        self._num_told += 1
        here = f"tour/told/{self._num_told}/"
        self._store.set(here + str(self.rank), json.dumps(value))
        return [json.loads(self._store.get(here + str(rank))) for rank in range(self.size)]

    def say_each(self, text: str) -> None:
        """One line from every rank, in order."""
        for line in self.tell(text):
            self.say(f"  {line}")

    def wires(self, width: int, kind: str | None = None) -> Transport:
        """This rank's wires to its neighbours. kind None: the best there is here."""
        frames = Frames(width, torch.float32, max_rows=1024, depth=2 * self.size, device=self.device)
        name = kind or self.transport
        transport = create_transport(name, frames, parallel_state.get_pp_group())
        transport.warm_up()
        return transport

    def close(self) -> None:
        """Nobody leaves before all are done."""
        self.tell("done")
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
