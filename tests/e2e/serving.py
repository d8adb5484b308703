"""Real servers for tests: torchrun, real gRPC, real signals, free ports; ended by process id, always."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from ppserve.process.lifetime import ending_with_us
from tests import as_gpu
from tests.forking import ForkedLauncher
from tests.slow import require_slow_test

T = TypeVar("T")

# In a terminal, the line of the start is erased before it.
READY = re.compile(r"^(?:\x1b\[K)?ppserve ready grpc=(\S+) metrics=(\S+) stages=(\d+) http=(\S+)$", re.MULTILINE)
START_WITHIN_S = 90.0
"""How long a start may say nothing new."""
END_WITHIN_S = 30.0


def wait_until(
    value_of: Callable[[], T],
    problem: Callable[[], str] = str,
    timeout_s: float = 60,
    progress: Callable[[], object] = lambda: None,
) -> T:
    """Return the first true value. problem: what to say if there is none in time. progress: a value with which the
    time begins anew when it changes."""
    until_s, seen = time.monotonic() + timeout_s, progress()
    while not (value := value_of()):
        if (now_seen := progress()) != seen:
            until_s, seen = time.monotonic() + timeout_s, now_seen
        assert time.monotonic() < until_s, problem()
        time.sleep(0.01)
    return value


def stage_below(rank: int) -> int | None:
    """The process id of the stage that lives now of the rank with this process id. It has a name of its own; its
    command line is that of the fork server."""
    for process in psutil.Process(rank).children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):  # it ended meanwhile
            if process.name() == "ppserve.stage" and process.status() != psutil.STATUS_ZOMBIE:
                return process.pid
    return None


@dataclass
class Server:
    """A running server: its launcher process, what it printed, its addresses."""

    process: subprocess.Popen[bytes] | ForkedLauncher
    log_path: Path
    grpc: str = ""
    metrics: str = ""
    http: str = ""
    seen: set[int] = field(default_factory=set)

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """The launcher and everything below it that is alive."""
        try:
            root = psutil.Process(self.process.pid)
            found = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            found = []
        self.seen.update(p.pid for p in found)
        return found

    def stage_pid(self, stage: int) -> int:
        """The process id of a stage; after its death that of the next."""
        rank = self.rank_pid(stage)
        pid = wait_until(lambda: stage_below(rank), lambda: f"no process of stage {stage}\n{self.log}")
        assert pid is not None
        return pid

    def head_pid(self) -> int:
        """The process id of the head, which is rank 0."""
        return self.rank_pid(0)

    def rank_pid(self, rank: int) -> int:
        """The process id of a rank. Where ranks are forked, the names of the launcher's children tell."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if "ppserve" in process.cmdline() and process.environ().get("RANK") == str(rank):
                    return process.pid
                if process.ppid() == self.process.pid and process.name() == f"ppserve.rank{rank}":
                    return process.pid
        raise AssertionError(f"no process of rank {rank}\n{self.log}")

    def left_over(self) -> list[int]:
        """Process ids once seen below the launcher that are still alive (zombies do not count)."""
        return [pid for pid in self.seen if alive(pid)]

    def wait_gone(self) -> None:
        """Wait until no process of this server is alive."""
        wait_until(lambda: not self.left_over(), lambda: f"left over: {self.left_over()}")

    def wait_for_line(self, pattern: str, since: int = 0) -> None:
        """Wait until the log has such a line, behind its first `since` characters."""
        wait_until(lambda: re.search(pattern, self.log[since:]), lambda: f"no line {pattern!r}\n{self.log}")

    def metric(self, sample_name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        samples = [sample for sample in self.samples() if sample.name == sample_name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def samples(self) -> list[Sample]:
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=30) as page:
            families = text_string_to_metric_families(page.read().decode())
            return [sample for family in families for sample in family.samples]

    def wait_exit(self, timeout_s: float = END_WITHIN_S) -> int:
        return self.process.wait(timeout_s)

    def terminate(self) -> int:
        """SIGTERM to the launcher, as an operator would; the launcher's exit code."""
        self.processes()
        self.process.send_signal(signal.SIGTERM)
        return self.wait_exit()

    def end(self) -> None:
        """Ends exactly the processes of this server, whatever state they are in."""
        self.processes()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(END_WITHIN_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for pid in self.left_over():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def torchrun(stages: int) -> list[str]:
    """The command that starts so many ranks of a server; its flags follow."""
    ranks = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={stages}", f"--log-dir={os.devnull}"]
    return [sys.executable, "-m", "torch.distributed.run", *ranks, "-m", "ppserve"]


def plain_shell(stages: int) -> list[str]:
    """Return the command that starts a server without torchrun's command line."""
    return [sys.executable, "-m", "ppserve", "serve", "--stages", str(stages)]


@dataclass(frozen=True)
class Forked:
    """So many ranks, and their stages, without the imports: a server starts in 1 s of CPU time and not in 8."""

    num_ranks: int

    def start(self, flags: list[str], environment: dict[str, str], log: Path) -> ForkedLauncher:
        return ForkedLauncher("launch", (self.num_ranks, flags), environment, log)


Launcher = Sequence[str] | Forked
"""A command that flags may follow, or what to fork."""


def launch(
    command: Launcher, arguments: Sequence[str], log_path: Path, env: dict[str, str] | None = None
) -> Server:
    """Starts a server on free ports; does not wait. `--dtype auto` depends on the CPU: not here."""
    require_slow_test("a server")
    ports = ("--port", "0", "--metrics-port", "0", "--http-port", "0")
    flags = [*as_gpu.flags(arguments), *ports, "--dtype", "float32", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    with log_path.open("wb") as log:
        if isinstance(command, Forked):
            return Server(command.start(flags, environment, log_path), log_path)
        process = subprocess.Popen(
            ending_with_us([*command, *flags]), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            env=environment,
        )  # fmt: skip
    return Server(process, log_path)


def wait_ready(server: Server) -> Server:
    """Wait until the ready line; fail with the log when the server ends or takes too long."""

    def match() -> re.Match[str] | None:
        assert server.process.poll() is None, f"the server ended with {server.process.poll()}\n{server.log}"
        return READY.search(server.log)

    ready = wait_until(match, lambda: f"not ready in time\n{server.log}", START_WITHIN_S, lambda: server.log)
    assert ready is not None
    server.grpc, server.metrics, server.http = ready[1], ready[2], ready[4]
    server.processes()
    return server


@contextmanager
def serving(
    stages: int = 2,
    *arguments: str,
    env: dict[str, str] | None = None,
    by: Callable[[int], Launcher] = torchrun,
) -> Iterator[Server]:
    """A server that is ready, and gone afterwards. by: `torchrun`, `plain_shell` or `Forked`;
    benchmarks, which measure, have fresh interpreters as users have."""
    with tempfile.TemporaryDirectory(prefix="ppserve-test-") as directory:
        server = launch(by(stages), arguments, Path(directory) / "server.log", env)
        try:
            yield wait_ready(server)
        except BaseException:
            print(server.log[-6000:], file=sys.stderr)
            raise
        finally:
            server.end()
