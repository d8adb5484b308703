"""SIGHUP: the head reads its certificates again, in any process; a terminal that is closed ends the server."""

from __future__ import annotations

import os
import signal
import ssl
import sys
from pathlib import Path

import psutil

from tests.certificates import make_certificates, needs_openssl
from tests.e2e.serving import plain_shell, serving

# Runs a command in a terminal of its own, which is closed when this process ends.
_TERMINAL = """
import os, pty, sys, tty
pid, screen = pty.fork()
if pid == 0:
    tty.setraw(0)
    os.execvp(sys.argv[1], sys.argv[1:])
while written := os.read(screen, 4096):
    os.write(1, written)
"""


def in_a_terminal(stages: int) -> list[str]:
    return [sys.executable, "-c", _TERMINAL, *plain_shell(stages)]


@needs_openssl
def test_a_certificate_that_was_replaced_is_shown_after_a_sighup_to_the_launcher(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    files = "--tls-cert", str(tmp_path / "leaf.pem"), "--tls-key", str(tmp_path / "leaf.key")
    trace = "--trace", str(tmp_path / "trace.json")
    with serving(1, *files, *trace, by=in_a_terminal) as server:
        [launcher] = psutil.Process(server.process.pid).children()
        stage = server.stage_pid(0)
        host, _, port = server.http.rpartition(":")
        shown = [ssl.get_server_certificate((host, int(port)))]
        make_certificates(tmp_path)
        shown.append(ssl.get_server_certificate((host, int(port))))
        os.kill(launcher.pid, signal.SIGHUP)
        server.wait_for_line("certificates read again")
        shown.append(ssl.get_server_certificate((host, int(port))))
        os.kill(launcher.pid, signal.SIGUSR1)
        server.wait_for_line("trace written to")
        os.killpg(server.head_pid(), signal.SIGHUP)  # torchrun's way, which meets the stage as well
        server.wait_for_line("certificates read again(.|\n)*certificates read again")
        assert server.stage_pid(0) == stage, "a stage died of a signal that is for the head"
        server.process.kill()
        server.wait_gone()
    assert shown[0] == shown[1] != shown[2]
    assert shown[2].strip() in (tmp_path / "leaf.pem").read_text()
