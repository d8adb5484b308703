"""The log of a process, and that no writer waits for a reader."""

from __future__ import annotations

import json
import os
import pty
import select
import socket
import subprocess
import sys
import tty
from pathlib import Path
from typing import Any

import pytest

SURVIVES = "from ppserve.process.log import never_wait_for_readers; never_wait_for_readers()"
SPEAKS = "print('said', file=sys.stderr, flush=True); print('said', flush=True); logging.warning('said')"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize(("survives", "code"), [(True, 3), (False, 1)])
def test_a_full_disk_ends_nothing(survives: bool, code: int) -> None:
    """A control shows that a full disk ends a process which does not survive it."""
    program = f"import logging, sys\n{SURVIVES if survives else 'pass'}\n{SPEAKS}\nsys.exit(3)"
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=full, timeout=60)
    assert ended.returncode == code


def test_what_can_be_written_is_and_debug_is_ours_and_not_the_compilers() -> None:
    program = f"""if True:
        import logging, sys
        {SURVIVES}
        {SPEAKS}
        from ppserve.config import ServerSettings
        from ppserve.process.log import set_up_logging
        set_up_logging(ServerSettings(log_level="debug"), "stage 0")
        logging.getLogger("numba.core").debug("an instruction")
        logging.getLogger("ppserve.stage").debug("a step")
    """
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr[:23]) == ("said\n", "said\nWARNING:root:said\n")
    assert "a step" in ended.stderr
    assert "an instruction" not in ended.stderr


WRITES_MUCH = f"""if True:
    import logging, os, sys, threading
    {SURVIVES}
    from ppserve.config import ServerSettings
    from ppserve.process.log import flush_streams, on_dropped, set_up_logging
    set_up_logging(ServerSettings(log_format="json"))
    counted = []
    on_dropped(counted.append)
    warn = lambda numbers: [logging.warning("a line", extra=dict(number=number)) for number in numbers]
    others = threading.Thread(target=warn, args=(range(5_000, 10_000),))
    others.start()
    warn(range(5_000))
    others.join()
    try:  # as a library does
        while True:
            os.write(2, b"{{}}" + b" " * 4000 + b"\\n")
    except BlockingIOError:
        os.write(int(sys.argv[1]), b"written")
    os.read(0, 1)
    flush_streams()
    logging.warning("%d", sum(counted))
    print("ready")
"""


def two_ends(kind: str) -> tuple[int, int]:
    """What a program writes to, and what it is read from."""
    if kind == "pipe":
        read, write = os.pipe()
    elif kind == "socket":
        read, write = (one.detach() for one in socket.socketpair())
    else:
        read, write = pty.openpty()
        tty.setraw(write)
    return write, read


def read_all(fd: int) -> bytes:
    heard = b""
    try:
        while piece := os.read(fd, 1 << 16):
            heard += piece
    except OSError:  # the end of a terminal
        pass
    return heard


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pipe", "socket", "terminal"])
def test_what_nobody_reads_holds_nothing_up_and_every_line_that_is_dropped_is_counted(kind: str) -> None:
    """Ten thousand lines of two threads, and some of a library. (A library's to a socket may wait.)"""
    write, read = two_ends(kind)
    done, tells = os.pipe()
    program = WRITES_MUCH.replace("os.write(2, ", "raise BlockingIOError(") if kind == "socket" else WRITES_MUCH
    command, ends = (
        [sys.executable, "-c", program, str(tells)],
        {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE},
    )
    child = subprocess.Popen(command, **ends, stderr=write, pass_fds=(tells,))
    with child:
        for fd in (write, tells):
            os.close(fd)
        assert select.select([done], [], [], 60)[0], "it waits for a reader"
        assert os.read(done, 7) == b"written"
        assert child.stdin is not None
        child.stdin.write(b"r")
        child.stdin.close()
        heard = read_all(read)
        assert child.stdout is not None
        assert child.stdout.read() == b"ready\n"
    for fd in (read, done):
        os.close(fd)
    lines: list[dict[str, Any]] = [json.loads(line) for line in heard.splitlines()]
    numbers = [line["number"] for line in lines if "number" in line]
    first, second = ([number for number in numbers if (number < 5_000) is ours] for ours in (True, False))
    assert (first, second) == (sorted(first), sorted(second)), "out of order"
    notice, counted = (line["message"] for line in lines[-2:])
    dropped = int(counted)
    assert 0 < dropped == 10_000 - len(numbers)
    assert notice.startswith(f"{dropped} lines before this one were dropped")
