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
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    process.stdin.write(QUESTION)
    process.stdin.flush()
    return process


def test_an_answer_outlives_a_stage_and_its_server() -> None:
    flags = ("--http-port", str(port_to_come_back_to()), "--chat-template", TEMPLATE)
    with serving(2, *flags, by=Forked) as server:
        whole, _ = ask(server.http).communicate(timeout=60)
        assert len(whole) > 80
        for kills_head in (False, True):
            process = ask(server.http)
            assert process.stdout is not None
            begun = process.stdout.read(10)
            pid = server.head_pid() if kills_head else server.stage_pid(1)
            os.kill(pid, signal.SIGKILL)
            if kills_head:
                wait_until(lambda pid=pid: not alive(pid))
                with serving(2, *flags, by=Forked):
                    rest, told = process.communicate(timeout=60)
            else:
                rest, told = process.communicate(timeout=60)
            assert begun + rest == whole
            assert process.returncode == 0, told
