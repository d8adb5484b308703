"""Two agents of torchrun on one machine: each starts one rank, as two hosts would. The agents are forked, so that
they need no imports; the ranks are not."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ppserve.model.cpu.kernels.variants import VARIABLE
from tests.certificates import make_certificates
from tests.e2e.serving import READY, START_WITHIN_S, stage_below, wait_until
from tests.forking import ForkedLauncher
from tests.hosts.two_hosts import Agent
from tests.ports import port_to_come_back_to
from tests.slow import require_slow_test

# Without it, c10d's rendezvous of torch 2.13 never tells an agent that joins later where rank 0 is: it waits for a
# key that rank 0's agent writes once in its life (`DynamicRendezvousHandler.next_rendezvous`).
_AGENTS_MAY_JOIN_LATER = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@dataclass
class TwoAgents:
    """A pipeline of two ranks, each of an agent of its own. rendezvous: `static` or `c10d`. flags: further ones.
    variants: each agent's PPSERVE_CPU_KERNELS."""

    rendezvous: str
    directory: Path
    flags: tuple[str, ...] = ()
    variants: tuple[str, str] | None = None
    agents: dict[int, Agent] = field(default_factory=dict)
    master_port: int = field(default_factory=port_to_come_back_to)
    grpc_port: int = field(default_factory=port_to_come_back_to)
    num_started: int = 0

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def start(self, node: int) -> Agent:
        """Start an agent, by an equal command where it is started again."""
        where = f"127.0.0.1:{self.master_port}"
        if self.rendezvous == "static":
            launcher = [f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={self.master_port}"]
        else:
            launcher = ["--rdzv-backend=c10d", f"--rdzv-endpoint={where}", "--rdzv-id=two"]
            # An agent is dead after five seconds of silence, and not torch's fifteen.
            silence = "keep_alive_interval=1,keep_alive_max_attempt=5"
            launcher.append(f"--rdzv-conf=is_host={int(node == 0)},{silence}")
        secret = self.directory / "secret"
        secret.write_text("the secret of two agents in a test\n")
        arguments = [
            *("--nnodes=2", "--nproc-per-node=1"),
            *("--max-restarts=3", "--monitor-interval=0.2", "--local-addr=127.0.0.1", *launcher),
            *("-m", "ppserve", "--force-cpu", "--dtype", "float32", "--port", str(self.grpc_port)),
            *("--metrics-port", "0", "--http-port", "0", "--secret-file", str(secret), "--shutdown-timeout", "5"),
            *self._tls(),
            *self.flags,
        ]
        log_path = self.directory / f"{self.num_started}-agent{node}.log"
        self.num_started += 1
        log_path.touch()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **_AGENTS_MAY_JOIN_LATER}
        if self.variants is not None:
            environment[VARIABLE] = self.variants[node]
        process = ForkedLauncher("run_torchrun", arguments, environment, log_path)
        if node in self.agents:
            self.agents[node].end()
        self.agents[node] = Agent(process, log_path)
        return self.agents[node]

    def _tls(self) -> list[str]:
        """Return the flags of the control plane's TLS, which one of the two kinds of rendezvous has."""
        if self.rendezvous != "static" or shutil.which("openssl") is None:
            return []
        if not (self.directory / "ca.pem").exists():
            make_certificates(self.directory)
        files = {"cert": "leaf.pem", "key": "leaf.key", "ca": "ca.pem"}
        return [f"--stage-tls-{part}={self.directory / name}" for part, name in files.items()]

    def rank_pid(self, rank: int) -> int:
        """The process that torchrun started as this rank."""
        for agent in self.agents.values():
            if agent.process.poll() is None:
                for process in psutil.Process(agent.process.pid).children():
                    with suppress(psutil.NoSuchProcess):  # one that was killed, and is not reaped yet
                        if process.environ().get("RANK") == str(rank):
                            return process.pid
        raise AssertionError(f"no rank {rank}\n{self.logs}")

    def stage_pid(self, rank: int) -> int:
        """The process that computes for this rank."""
        pid = stage_below(self.rank_pid(rank))
        assert pid is not None, f"no stage of rank {rank}\n{self.logs}"
        return pid

    @property
    def logs(self) -> str:
        paths = sorted(self.directory.glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-4000:]}" for path in paths)

    def wait_ready(self, times: int = 1) -> None:
        """Wait until that many heads in all have said that they serve."""
        wait_until(
            lambda: len(READY.findall(self.everything())) >= times,
            lambda: f"not ready in time\n{self.logs}", START_WITHIN_S, self.everything,
        )  # fmt: skip

    def everything(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.directory.glob("*.log")))


@contextmanager
def two_agents(rendezvous: str, *flags: str, variants: tuple[str, str] | None = None) -> Iterator[TwoAgents]:
    require_slow_test("agents of torchrun")
    with tempfile.TemporaryDirectory(prefix="ppserve-agents-") as directory:
        agents = TwoAgents(rendezvous, Path(directory), flags, variants)
        try:
            agents.start(0)
            agents.start(1)
            agents.wait_ready()
            yield agents
        except BaseException:
            print(agents.logs, file=sys.stderr)
            raise
        finally:
            for agent in agents.agents.values():
                agent.end()
