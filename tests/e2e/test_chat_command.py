"""`ppserve chat` while stages are killed, and while the whole server is and comes back: the same answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.e2e.serving import Forked, alive, serving, wait_until
from tests.ports import port_to_come_back_to

TEMPLATE = str(Path(__file__).with_name("chat.jinja"))
QUESTION = "Once upon a time there was a dragon.\n"


def ask(http: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ppserve", "chat", "--url", f"http://{http}"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    process.stdin.write(QUESTION)
    process.stdin.close()
    return process


def read(process: subprocess.Popen[str], count: int = -1) -> str:
    assert process.stdout is not None
    return process.stdout.read(count)


def test_an_answer_outlives_a_stage_and_its_server() -> None:
    flags = ("--http-port", str(port_to_come_back_to()), "--chat-template", TEMPLATE)
    with serving(2, *flags, by=Forked) as server:
        with ask(server.http) as process:
            whole = read(process)
        assert len(whole) > 80
        with ask(server.http) as process:
            begun = read(process, 10)
            os.kill(server.stage_pid(1), signal.SIGKILL)
            assert begun + read(process) == whole
        assert process.returncode == 0
        with ask(server.http) as process:
            begun = read(process, 10)
            os.kill(head := server.head_pid(), signal.SIGKILL)
            wait_until(lambda: not alive(head))
            with serving(2, *flags, by=Forked):
                assert begun + read(process) == whole
        assert process.returncode == 0
