"""Two hosts made of network namespaces: own names, own addresses, and one cable between them.

Each has its own loopback, routes and host name, so what works here by 127.0.0.1 works for one host alone.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ppserve.process.lifetime import ending_with_us
from tests.e2e.serving import READY, START_WITHIN_S
from tests.forking import ForkedLauncher

ADDRESSES = ("10.77.0.1", "10.77.0.2")
ADDRESSES_6 = ("fd77::1", "fd77::2")
NAMES = ("host0", "host1")
MASTER_PORT = 29500
_TOKENS_BEFORE_FAULTS = 20


def why_not() -> str | None:
    """Why namespaces cannot be made here; None if they can."""
    if shutil.which("ip") is None:
        return "the program `ip` is missing"
    if os.getuid() != 0:
        return "network namespaces need root"
    probe = f"ppserve-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces are not allowed: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return None


needs_hosts = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@dataclass
class Agent:
    """A torchrun on one host, and what it printed."""

    process: subprocess.Popen[bytes] | ForkedLauncher
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def end(self) -> None:
        """End it by its process id; its ranks and stages go with it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@dataclass
class Streamed:
    """What a client printed."""

    text: str = ""
    longest_pause_s: float = 0.0
    _last_s: float | None = None

    def take(self, line: str) -> None:
        now_s = time.monotonic()
        self.longest_pause_s = max(self.longest_pause_s, now_s - (self._last_s or now_s))
        self._last_s = now_s
        self.text += str(json.loads(line).get("text", "")) if line.startswith("{") else line


@dataclass
class TwoHosts:
    """Commands and servers on them, and the cable."""

    namespaces: tuple[str, str]
    directory: Path
    agents: list[Agent] = field(default_factory=list)

    def command(self, host: int, words: Sequence[str]) -> list[str]:
        """Run these on that host, under its name. The process id is that of the last word's program."""
        named = f'hostname {NAMES[host]} && exec "$@"'
        return ["ip", "netns", "exec", self.namespaces[host], "unshare", "--uts", "sh", "-c", named, "-", *words]

    def torchrun(self, host: int, master: str, *flags: str, launcher: Sequence[str] = ()) -> Agent:
        secret = self.directory / "secret"
        secret.write_text("the secret of two hosts in a test\n")
        words = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *launcher),
            *(f"--node-rank={host}", f"--master-addr={master}", f"--master-port={MASTER_PORT}"),
            *("-m", "ppserve", "--force-cpu", "--dtype", "float32", "--port", "0", "--metrics-port", "0"),
            *("--secret-file", str(secret), *flags),
        ]
        log_path = self.directory / f"{len(self.agents)}-host{host}.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                ending_with_us(self.command(host, words)), stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self.agents.append(Agent(process, log_path))
        return self.agents[-1]

    def run(self, host: int, *words: str, timeout_s: float = 60) -> str:
        """What a command on that host prints."""
        done = subprocess.run(self.command(host, words), capture_output=True, text=True, timeout=timeout_s)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def wait_ready(self, head: Agent, within_s: float = START_WITHIN_S) -> str:
        """The address of gRPC on host 0."""
        until_s, said = time.monotonic() + within_s, ""
        while (match := READY.search(head.log)) is None:
            if head.log != said:  # the start goes on
                until_s, said = time.monotonic() + within_s, head.log
            logs = "\n".join(f"--- {agent.log_path.name}\n{agent.log[-3000:]}" for agent in self.agents)
            assert time.monotonic() < until_s, f"not ready in time\n{logs}"
            assert all(agent.process.poll() is None for agent in self.agents), f"an agent ended\n{logs}"
            time.sleep(0.05)
        return match[1]

    def stream(self, target: str, num_tokens: int, *faults: Callable[[], None]) -> Streamed:
        """An answer on the head's host, the same every time. Each fault begins beside the stream, once that
        continues after the one before. Raises AssertionError if the stream fails, or ends before all faults."""
        asked = ("--target", target, "--seed", "7", "--max-tokens", str(num_tokens), "--ignore-eos", "--json")
        command = self.command(0, [sys.executable, "-m", "ppserve", "generate", *asked, "Once upon a time"])
        left, doing, seen = list(faults), threading.Thread(), Streamed()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            for number, line in enumerate(process.stdout):
                seen.take(line)
                if number >= _TOKENS_BEFORE_FAULTS and left and not doing.is_alive():
                    doing = threading.Thread(target=left.pop(0))
                    doing.start()
        if doing.ident is not None:
            doing.join()
        assert process.returncode == 0, seen.text[-1000:]
        assert not left, f"the stream ended before {len(left)} of the faults"
        return seen

    def pull_cable(self, seconds: float) -> None:
        """Pull it out for so long."""
        self.cable(connected=False)
        time.sleep(seconds)
        self.cable(connected=True)

    def cable(self, connected: bool) -> None:
        """Plugs the cable in at host 1, or pulls it out."""
        state = "up" if connected else "down"
        _ip("-n", self.namespaces[1], "link", "set", "eth0", state)
        if connected:  # the address of IPv6 went with the link
            with suppress(subprocess.CalledProcessError):
                _ip("-n", self.namespaces[1], "addr", "add", f"{ADDRESSES_6[1]}/64", "dev", "eth0", "nodad")


@contextmanager
def two_hosts(names_are_loopback: bool = False) -> Iterator[TwoHosts]:
    """names_are_loopback: a host takes its own name for 127.0.1.1, as on Debian, and does not know the other's."""
    with ExitStack() as undo, tempfile.TemporaryDirectory(prefix="ppserve-hosts-") as directory:
        spaces = (f"pp{os.getpid()}a", f"pp{os.getpid()}b")
        for host, space in enumerate(spaces):
            _ip("netns", "add", space)
            undo.callback(_ip, "netns", "del", space)
            undo.callback(shutil.rmtree, f"/etc/netns/{space}", ignore_errors=True)
            _write_hosts_file(space, host, names_are_loopback)
        peer = ("peer", "name", "eth0", "netns", spaces[1])
        _ip("link", "add", "eth0", "netns", spaces[0], "type", "veth", *peer)
        for host, space in enumerate(spaces):
            _ip("-n", space, "addr", "add", f"{ADDRESSES[host]}/24", "dev", "eth0")
            _ip("-n", space, "addr", "add", f"{ADDRESSES_6[host]}/64", "dev", "eth0", "nodad")
            for link in ("lo", "eth0"):
                _ip("-n", space, "link", "set", link, "up")
        hosts = TwoHosts(spaces, Path(directory))
        try:
            yield hosts
        finally:
            for agent in hosts.agents:
                agent.end()


def _write_hosts_file(space: str, host: int, names_are_loopback: bool) -> None:
    """`ip netns exec` shows it to its commands as /etc/hosts."""
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    if names_are_loopback:
        lines.append(f"127.0.1.1 {NAMES[host]}")
    else:
        lines += [f"{address} {name}" for address, name in zip(ADDRESSES, NAMES, strict=True)]
    directory = Path("/etc/netns") / space
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "hosts").write_text("\n".join(lines) + "\n")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
