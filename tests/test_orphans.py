"""What tests start ends with them, also when nothing is left to clean up."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil

_A_TEST_PROCESS = """
import subprocess, sys
from tests.orphans import dying_with_us
print(subprocess.Popen(dying_with_us([sys.executable, "-c", "import time; time.sleep(60)"])).pid, flush=True)
sys.stdin.read()
"""


def test_a_server_ends_with_the_process_that_started_it_even_by_kill_9() -> None:
    command = [sys.executable, "-c", _A_TEST_PROCESS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as tester:
        assert tester.stdout is not None
        server = psutil.Process(int(tester.stdout.readline()))
        assert server.is_running()
        tester.send_signal(signal.SIGKILL)
        server.wait(10)
