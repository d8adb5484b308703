"""Forked ranks and stages are as separate from each other as those that are started."""

from __future__ import annotations

import os
import signal

import psutil

from tests.e2e.asking import ask, requests_with_everything
from tests.e2e.serving import Forked, serving


def sockets_and_pipes(pid: int) -> set[str]:
    found = (os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd"))
    return {name for name in found if name.startswith(("socket:", "pipe:"))}


def test_a_forked_stage_shares_nothing_with_its_keeper_and_nothing_outlives_the_launcher() -> None:
    with serving(2, by=Forked) as server:
        assert ask(server.grpc, requests_with_everything(2, seed=1), at_once=2)
        head, worker = server.rank_pid(0), server.rank_pid(1)
        killed = server.stage_pid(0)
        os.kill(killed, signal.SIGKILL)  # its successor was forked beside the head's threads
        assert ask(server.grpc, requests_with_everything(2, seed=1), at_once=2)
        stage = server.stage_pid(0)
        assert stage != killed
        assert psutil.Process(stage).ppid() == head
        assert not sockets_and_pipes(stage) & sockets_and_pipes(head)
        assert not sockets_and_pipes(stage) & sockets_and_pipes(worker)
        os.kill(server.process.pid, signal.SIGKILL)
        assert server.process.wait(10) == -signal.SIGKILL
        server.wait_gone()
