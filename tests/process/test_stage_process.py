"""A real fork server and its children, which speak a stage's side of the socket, without torch."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import psutil
import pytest

from ppserve import wire
from ppserve.config import ServeConfig
from ppserve.process.stage_process import ForkServer, StageProcess
from tests.e2e.serving import alive, wait_until

ENDPOINT = wire.HeadEndpoint("127.0.0.1:4242", Path("secret"))
START = wire.Start(ServeConfig(), 1, 2, ENDPOINT)
# The fork server of `python -m ppserve.stage`, whose stages do something else. What they write comes in pieces
# that do not respect lines.
COMMON = """
import os, signal, sys, time
from ppserve import wire
from ppserve.stage import __main__ as main
main._import = lambda life: None
def run_stage_process(life, parent):
    main.die_with_parent(parent)
    os.write(life, b"forked %d" % os.getpid())
    os.write(life, b"\\n\\nstar")
    return live(life)
main.run_stage_process = run_stage_process
def told(life):
    return (wire.FrameReader(wire.Start).feed(os.read(life, 1 << 16)) or sys.exit(75))[0]
"""
STAGE = """
def live(life):
    start = told(life)
    os.write(life, f"ted\\n{start.head_endpoint.address} {start.head_endpoint.secret_file}\\nserved\\n".encode())
    return start.rank + 10
"""
STUCK = """
def live(life):
    signal.pause()
"""
DYING = """
def live(life):
    return 7
"""
RUN = "main.run_and_exit(main.main)"
# Ctrl-C in a terminal, and a supervisor's SIGTERM to all processes, before the fork server has said what it does
# on them. Its stage must not stay deaf to what it does not ignore.
INTERRUPTED = """
os.kill(os.getpid(), signal.SIGINT)
os.kill(os.getpid(), signal.SIGTERM)
def live(life):
    return len(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""
# A module of those that stages import that takes long.
SLOW_IMPORT = """
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "ppserve.stage.probe":
            time.sleep(0.7)
import importlib
importlib.reload(main)
main.run_stage_process = run_stage_process
live = lambda life: 0
sys.meta_path.insert(0, Slow())
"""
KEEPER = """
import os, signal, sys
from ppserve.process.stage_process import ForkServer
process = ForkServer((sys.executable, "-c", sys.argv[1])).fork()
while not (lines := [line for line in process.listen(30) if line.startswith("forked ")]):
    pass
pid = int(lines[0].split()[1])
import psutil
print(pid, psutil.Process(pid).ppid(), flush=True)
signal.pause()
"""

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def server_of() -> Iterator[Callable[..., ForkServer]]:
    """What makes the fork server of a program; without one, the real fork server."""

    def make(*program: str, run: str = RUN) -> ForkServer:
        command = [(sys.executable, "-c", COMMON + each + run) for each in program]
        return ends.enter_context(closing(ForkServer(*command)))

    with ExitStack() as ends:
        yield make


def lines_of(process: StageProcess) -> list[str]:
    heard: list[str] = []
    while (lines := process.listen(30)) is not None:
        heard += lines
    return heard


def await_end(process: StageProcess) -> int:
    """The exit code of one that says nothing more."""
    assert lines_of(process) == []
    return process.reap()


def pid_of(process: StageProcess) -> int:
    while True:
        lines = process.listen(30)
        assert lines is not None, "it has ended before it was forked"
        for line in lines:
            if line.startswith("forked "):
                return int(line.split()[1])


def wait_for_zombie(pid: int) -> None:
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_a_stage_is_told_what_to_do_and_its_lines_arrive_whole(server_of: Callable[[str], ForkServer]) -> None:
    process = server_of(STAGE).fork()
    pid = pid_of(process)
    process.start(START)
    assert lines_of(process)[-3:] == ["started", "127.0.0.1:4242 secret", "served"]
    wait_for_zombie(pid)  # its number is not free before it is reaped
    assert process.reap() == 11
    assert not psutil.pid_exists(pid)


def test_one_server_forks_one_stage_after_the_other_and_leaves_nothing_open(
    server_of: Callable[[str], ForkServer],
) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    server = server_of(STAGE)
    server.prepare()
    parents = set()
    for _ in range(3):
        process = server.fork()
        parents.add(psutil.Process(pid_of(process)).ppid())
        process.start(START)
        assert lines_of(process)[-1] == "served"
        assert process.reap() == 11
    assert len(parents) == 1
    server.close()
    with pytest.raises(FileNotFoundError):
        ForkServer(("/no/such/program",)).fork()
    assert sorted(os.listdir("/proc/self/fd")) == before, "descriptors stay open"
    with open(os.devnull):
        assert sorted(os.listdir("/proc/self/fd")) != before, "the test can fail"


def test_nothing_said_is_not_the_end(server_of: Callable[[str], ForkServer]) -> None:
    process = server_of(STUCK).fork()
    pid_of(process)
    assert process.listen(0) == []
    process.kill()
    assert lines_of(process) == []
    process.kill()  # harmless
    assert process.reap() == -9
    process.kill()


def stop_and_kill(process: StageProcess) -> None:
    os.kill(psutil.Process(pid_of(process)).ppid(), signal.SIGSTOP)
    process.kill()


@pytest.mark.parametrize(
    ("program", "act", "code"),
    [
        ("time.sleep(1000)", StageProcess.kill, -9),
        ("sys.exit(3)", lambda process: process.start(START), 3),
        (STUCK + RUN, stop_and_kill, -9),
    ],
    ids=["is killed before it exists", "cannot import, and its end tells", "its server stands still"],
)
def test_one_ends_that(
    server_of: Callable[..., ForkServer], program: str, act: Callable[[StageProcess], None], code: int
) -> None:
    process = server_of("", run=program).fork()
    act(process)
    assert await_end(process) == code


@pytest.mark.parametrize("program", [STUCK, DYING], ids=["with its stage", "after its stage"])
def test_a_server_that_dies_is_replaced(server_of: Callable[[str], ForkServer], program: str) -> None:
    server = server_of(program)
    process = server.fork()
    parent = psutil.Process(pid_of(process)).ppid()
    if program == DYING:
        assert await_end(process) == 7
    os.kill(parent, signal.SIGKILL)
    if program == STUCK:
        assert await_end(process) == -9
    else:
        wait_for_zombie(parent)
    process = server.fork()
    assert psutil.Process(pid_of(process)).ppid() != parent
    process.kill()
    assert await_end(process) in (7, -9)


def test_signals_that_come_while_a_server_is_not_ready_for_them_do_not_end_it(
    server_of: Callable[[str], ForkServer],
) -> None:
    process = server_of(INTERRUPTED).fork()
    pid_of(process)
    assert lines_of(process)[-1:] == []
    assert process.reap() == 0


@pytest.mark.slow
def test_it_shows_life_while_it_imports(server_of: Callable[..., ForkServer]) -> None:
    process = server_of(SLOW_IMPORT).fork()
    assert process.listen(30) == [""]
    assert process.listen(30) == [""]
    assert any(line.startswith("forked ") for line in lines_of(process))
    assert process.reap() == 0


def test_it_ends_when_its_keeper_does() -> None:
    """The kernel then closes the keeper's end of the socket."""
    command = [sys.executable, "-c", KEEPER, COMMON + STUCK + RUN]
    keeper = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert keeper.stdout is not None
    pids = [int(pid) for pid in keeper.stdout.readline().split()]
    assert len(pids) == 2
    keeper.kill()
    keeper.wait()
    keeper.stdout.close()
    wait_until(lambda: not any(map(alive, pids)))


@pytest.mark.slow
def test_a_stage_begins_with_its_socket_and_the_server_has_no_thread(
    server_of: Callable[..., ForkServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real one, with all that it imports. Threads do not survive a fork; locks that they held stay held."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "4")
    process = server_of().fork()
    stage = psutil.Process(pid_of(process))
    assert stage.name() == "ppserve.stage"
    server = psutil.Process(stage.ppid())
    assert server.name() == "ppserve.forks"
    wait_until(lambda: server.num_threads() == 1)  # the kernel counts one that was joined a moment longer
    for which in stage, server:
        open_files = Path(f"/proc/{which.pid}/fd")
        # The server closes its end of the stage's socket after the fork.
        wait_until(lambda folder=open_files: len(os.listdir(folder)) == 4)
        *standard, last = sorted(open_files.iterdir(), key=lambda path: int(path.name))
        assert [path.name for path in standard] == ["0", "1", "2"]
        assert os.readlink(last).startswith("socket:")
    process.kill()
    assert set(lines_of(process)) <= {""}  # it writes an empty line each half second
    assert process.reap() == -9


def test_descriptors_from_1024_on_are_listened_to(server_of: Callable[[str], ForkServer]) -> None:
    """`select` refuses them: a head with a thousand clients could not replace its stage."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    ours = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while ours[-1] < 1024:
            ours.append(os.dup(ours[0]))
        process = server_of(DYING).fork()
        pid_of(process)
        assert await_end(process) == 7
    finally:
        for fd in ours:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
