"""A server for the tour, which starts it by its command line, reads its streams, and kills one of its stages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Unpack

from ppserve import Client, Options
from ppserve.process.lifetime import ending_with_us
from tour.errors import TourError

_READY = "ppserve ready grpc="
_PROGRESS = "starting, "
"""The beginning of the lines in which a server says how its start goes on."""
_SILENT_S = 120.0
"""A start that says nothing new for so long is given up."""
_LOOK_EVERY_S = 0.5
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "OMP_NUM")


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A running server. target: its gRPC address."""

    process: subprocess.Popen[str]
    target: str

    def kill_stage(self, stage: int) -> None:
        """Kill (SIGKILL) the process that holds a stage's weights. Its keeper and the head live on. Raises
        TourError if there is none."""
        for pid in sorted(_descendants(self.process.pid)):
            # A stage's command line is that of the fork server that it comes from; its name is its own.
            if _proc(pid, "comm") == b"ppserve.stage\n" and f"RANK={stage}".encode() in _environment(pid):
                os.kill(pid, signal.SIGKILL)
                return
        raise TourError(f"no process of stage {stage} is running")


@contextmanager
def serving(arguments: Sequence[str], report: Callable[[str], object]) -> Iterator[ServerProcess]:
    """Run `python -m ppserve serve ...` on this host during the block, which begins when the server is ready.

    report: called with the lines in which the server says how its start goes on. Raises TourError.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER_VARIABLES)}
    command = [sys.executable, "-m", "ppserve", "serve", *arguments]
    with tempfile.NamedTemporaryFile("w+", errors="replace") as complaints:
        process = subprocess.Popen(
            ending_with_us(command, by=signal.SIGTERM),
            env=environment,
            start_new_session=True,  # the tour ends it
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
        )
        is_ready = threading.Event()
        watching = threading.Thread(target=_watch_start, args=(process, Path(complaints.name), is_ready, report))
        watching.start()
        try:
            assert process.stdout is not None
            ready = next((line for line in process.stdout if line.startswith(_READY)), None)
            is_ready.set()
            watching.join()
            if ready is None:
                complaints.seek(0)
                raise TourError(f"the server did not start: {_complaint(complaints.read())}")
            yield ServerProcess(process, ready.removeprefix(_READY).split()[0])
        finally:
            is_ready.set()
            _end(process)


def _watch_start(
    process: subprocess.Popen[str], log: Path, is_ready: threading.Event, report: Callable[[str], object]
) -> None:
    """Pass on the server's lines about its start. Kill a server whose start says nothing new for _SILENT_S."""
    said, since_s = "", time.monotonic()
    while not is_ready.wait(_LOOK_EVERY_S):
        text = log.read_text(errors="replace")
        if text != said:
            said, since_s = text, time.monotonic()
            if told := [line for line in text.splitlines() if line.startswith(_PROGRESS)]:
                report(told[-1])
        elif time.monotonic() - since_s > _SILENT_S:
            process.kill()
            return


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
    process.communicate()


def _complaint(text: str) -> str:
    """Return the line in which the server says why it ended, without its launcher's lines."""
    said = [line for line in text.strip().splitlines() if not line.startswith(_PROGRESS)]
    own = [line.removeprefix("ppserve: ") for line in said if line.startswith("ppserve: ")]
    return (own[:1] or said[-1:] or ["it said nothing"])[0]


def _proc(pid: int, name: str) -> bytes:
    """Return the content of a process's file in /proc; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _environment(pid: int) -> list[bytes]:
    return _proc(pid, "environ").split(b"\0")


def _descendants(pid: int) -> list[int]:
    """Return the ids of all descendants of a process."""
    children = [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in _words(task)]
    return children + [below for child in children for below in _descendants(child)]


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


@dataclass(slots=True)
class WatchedStream:
    """A stream as its reader saw it. arrivals: seconds from the request to each token."""

    text: str
    arrivals: list[float]

    @property
    def longest_pause(self) -> float:
        return max(b - a for a, b in pairwise(self.arrivals))

    @property
    def tokens_per_s(self) -> float:
        """The tokens per second after the first token."""
        return (len(self.arrivals) - 1) / max(self.arrivals[-1] - self.arrivals[0], 1e-9)


def read_stream(
    client: Client, prompt: str, seen: Callable[[str, int], object] | None = None, **options: Unpack[Options]
) -> WatchedStream:
    """Read a stream to its end. seen: called with each chunk's text and the number of tokens so far."""
    started = time.monotonic()
    stream = WatchedStream("", [])
    for chunk in client.stream(prompt, **options):
        stream.text += chunk.text
        stream.arrivals += [time.monotonic() - started] * chunk.num_tokens
        if seen is not None:
            seen(chunk.text, len(stream.arrivals))
    return stream
