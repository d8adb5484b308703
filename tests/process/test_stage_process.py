"""A real child process that speaks a stage's side of the pipe, without torch."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import pytest

from ppserve import wire
from ppserve.config import ServeConfig
from ppserve.process.stage_process import StageProcess

MEETING = wire.Meeting(wire.TcpAddress("127.0.0.1", 4242), Path("secret"), is_ours=False)
START = wire.Start(ServeConfig(), 1, 2, MEETING)
# Of the pipe the child has only the number; what it writes comes in pieces that do not respect lines.
STAGE = """
import os, sys
from ppserve import wire
life, keeper = int(sys.argv[1]), int(sys.argv[2])
assert keeper == os.getppid()
os.write(life, b"\\nstar")
(start,) = wire.FrameReader(wire.FromKeeper).feed(os.read(0, 1 << 16)) or sys.exit(75)
os.write(life, f"ted\\n{start.meeting.address} {start.meeting.secret_file}\\nserved\\n".encode())
sys.exit(start.rank + 10)
"""
SPARE = "import os, sys; os.write(int(sys.argv[1]), b'\\n'); sys.exit(5 if os.read(0, 1) == b'' else 6)"
STUCK = "import os, sys, signal; os.write(int(sys.argv[1]), b'\\n'); signal.pause()"

pytestmark = pytest.mark.timeout(60)


def child(program: str) -> StageProcess:
    return StageProcess((sys.executable, "-c", program))


def lines_of(process: StageProcess) -> list[str]:
    heard: list[str] = []
    while (lines := process.listen(30)) is not None:
        heard += lines
    return heard


def test_a_stage_is_told_what_to_do_and_its_lines_arrive_whole() -> None:
    process = child(STAGE)
    assert process.listen(30) == [""]
    process.start(START)
    assert lines_of(process) == ["started", "127.0.0.1:4242 secret", "served"]
    assert process.end() == 11


def test_nothing_said_is_not_the_end() -> None:
    process = child(STUCK)
    assert process.listen(30) == [""]
    assert process.listen(0) == []
    process.kill()
    assert lines_of(process) == []
    process.kill()  # harmless
    assert process.end() == -9


def test_a_spare_ends_when_its_input_does() -> None:
    process = child(SPARE)
    assert process.listen(30) == [""]
    assert process.end() == 5


def test_a_child_that_died_in_waiting_is_found_out_at_its_end() -> None:
    process = child("import sys; sys.exit(7)")
    assert lines_of(process) == []
    process.start(START)
    assert process.end() == 7


def test_one_that_cannot_be_started_leaves_nothing_open() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        StageProcess(("/no/such/program",))
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_descriptors_from_1024_on_are_listened_to() -> None:
    """`select` refuses them: a head with a thousand clients could not replace its stage."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    ours = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while ours[-1] < 1024:
            ours.append(os.dup(ours[0]))
        process = child(SPARE)
        assert process.listen(30) == [""]
        assert process.end() == 5
    finally:
        for fd in ours:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
