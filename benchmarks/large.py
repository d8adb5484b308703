"""A model larger than a host's memory: int4 over two hosts of 4 GB each, and on one with room for all of it.

    PYTHONPATH=. python benchmarks/large.py [FILE.gguf]     as root: a host is a network namespace and a cgroup

Without a file, a Llama of 7.4 billion parameters is made. Tokens and log-probabilities must be those of one host:
alone, 16 at once, and where a host is lost and comes back.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.local_server import running
from ppserve.client import Client
from tests.hosts.two_hosts import ADDRESSES, Agent, two_hosts
from tools import make_random_llama

HOST_BYTES = 4 << 30
FLAGS = ("--quantization", "int4", "--max-model-len", "1024", "--kv-cache-memory", "256M", "--prefix-cache", "off")
CALLERS = {1: 24, 16: 16}
"""How many tokens each is to have, by the number of callers at once."""
HURT_TOKENS = 32
CGROUPS = Path("/sys/fs/cgroup")


def ask(target: str, callers: int) -> dict[str, Any]:
    """What they get, and how soon."""
    prompt, wanted = "Once upon a time there was a " * 4, {"max_tokens": CALLERS[callers], "ignore_eos": True}
    with Client(target) as client, ThreadPoolExecutor(callers) as threads:
        begun_s = time.monotonic()
        each = threads.map(lambda seed: client.complete(prompt, seed=seed, logprobs=1, **wanted), range(callers))
        answers = [[[token.id, token.logprob] for token in one.sequences[0].tokens] for one in each]
        rate = sum(map(len, answers)) / (time.monotonic() - begun_s)
    return {"answers": answers, "rate": round(rate, 2)}


class MemoryLimit:
    """A cgroup (of version 2, or else 1) for a host's processes, and the most that these had of their own:
    pages of files are the kernel's to take back."""

    def __init__(self, host: int) -> None:
        version = 2 if (CGROUPS / "cgroup.controllers").exists() else 1
        limit, self._own = {1: ("memory.limit_in_bytes", "total_rss"), 2: ("memory.max", "anon")}[version]
        self._group = (CGROUPS if version == 2 else CGROUPS / "memory") / f"ppserve-{os.getpid()}-{host}"
        if version == 2:
            (CGROUPS / "cgroup.subtree_control").write_text("+memory")
        self._group.mkdir()
        (self._group / limit).write_text(str(HOST_BYTES))
        self.most_mb = 0

    def hold(self, agent: Agent) -> None:
        (self._group / "cgroup.procs").write_text(str(agent.process.pid))

    def own_mb(self) -> int:
        lines = dict(line.split() for line in (self._group / "memory.stat").read_text().splitlines())
        self.most_mb = max(self.most_mb, own_mb := int(lines[self._own]) >> 20)
        return own_mb

    def remove(self) -> None:
        while (self._group / "cgroup.procs").read_text():
            time.sleep(0.1)
        self._group.rmdir()


@contextmanager
def memory_limits() -> Iterator[list[MemoryLimit]]:
    """Limit the memory of both hosts, and watch it."""
    limits, is_over = [MemoryLimit(host) for host in range(2)], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.1):
            for limit in limits:
                limit.own_mb()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield limits
    finally:
        is_over.set()
        thread.join()
        for limit in limits:
            limit.remove()


def on_two_hosts(model: Path, expected: dict[int, Any], hurt: str) -> dict[str, Any]:
    """expected: answers by the number of callers. hurt: the text of the stream that a host is lost to."""
    with memory_limits() as limits, two_hosts() as hosts:

        def start(host: int) -> Agent:
            flags = "--model", str(model), "--threads", "1", "--metrics-port", "9400", *FLAGS
            agent = hosts.torchrun(host, ADDRESSES[0], *flags)
            limits[host].hold(agent)
            return agent

        def lose_host() -> None:
            for pid in subprocess.check_output(["ip", "netns", "pids", hosts.namespaces[1]]).split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            worker.end()
            start(1)

        begun_s = time.monotonic()
        head, worker = start(0), start(1)
        target = hosts.wait_ready(head, within_s=600)
        ready_s = round(time.monotonic() - begun_s, 1)
        loading_mb, ready_mb = [limit.most_mb for limit in limits], [limit.own_mb() for limit in limits]
        figures: dict[str, Any] = {"ready_s": ready_s, "loading_mb": loading_mb, "ready_mb": ready_mb}
        for callers in CALLERS:
            asked = sys.executable, __file__, "ask", target, str(callers)
            got = json.loads(hosts.run(0, *asked, timeout_s=600))
            figures |= {f"rate_{callers}": got["rate"], f"equal_{callers}": got["answers"] == expected[callers]}
        seen = hosts.stream(target, HURT_TOKENS, lose_host)
        figures |= {"pause_s": round(seen.longest_pause_s, 1), "equal_hurt": seen.text == hurt}
        return figures | {"most_mb": [limit.most_mb for limit in limits]}


def main() -> int:
    if sys.argv[1:2] == ["ask"]:
        print(json.dumps(ask(sys.argv[2], int(sys.argv[3]))))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers and namespaces are ended
    model = Path(sys.argv[1] if len(sys.argv) > 1 else "large.gguf").absolute()
    if not model.exists():
        make_random_llama.write(model, **make_random_llama.SIZES)
    with running(["--stages", "1", "--force-cpu", "--model", str(model), *FLAGS]) as server:
        got = {callers: ask(server.grpc, callers) for callers in CALLERS}
        with Client(server.grpc) as client:
            hurt = client.complete("Once upon a time", seed=7, max_tokens=HURT_TOKENS, ignore_eos=True).text
    rates = {f"rate_{callers}": each["rate"] for callers, each in got.items()}
    print("one host", json.dumps({"ready_s": round(server.ready_s, 1), **rates}), flush=True)
    figures = on_two_hosts(model, {callers: each["answers"] for callers, each in got.items()}, hurt)
    print("two hosts", json.dumps(figures))
    return 0 if all(value for name, value in figures.items() if name.startswith("equal")) else 1


if __name__ == "__main__":
    sys.exit(main())
