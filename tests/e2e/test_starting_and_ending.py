"""How a server starts, refuses to start, and ends; what is left of it."""

from __future__ import annotations

import os
import platform
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import grpc
import psutil
import pytest

from ppserve.v1 import generation_pb2 as pb
from ppserve.v1.generation_pb2_grpc import GenerationServiceStub
from tests.e2e.asking import answers_alone, ask, requests_with_everything
from tests.e2e.serving import Forked, Server, launch, plain_shell, serving, wait_until
from tests.e2e.test_losing_stages import TINY
from tests.ports import port_to_come_back_to

ROOT = Path(__file__).resolve().parents[2]


def test_from_a_plain_shell_only_this_host_can_reach_any_process_and_none_outlives_the_launcher(
    tmp_path: Path,
) -> None:
    """No file outlives it either: nothing is written below the directories for what is temporary."""

    def listening(process: psutil.Process) -> set[tuple[str, str]]:
        found = [one.laddr for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]
        return {(address.ip.removeprefix("::ffff:"), str(address.port)) for address in found}

    places = {"TMPDIR": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    with serving(2, by=plain_shell, env=places) as server:
        everywhere = set().union(*(listening(process) for process in server.processes()))
        assert {host for host, _ in everywhere} == {"127.0.0.1"}
        assert listening(psutil.Process(server.process.pid)) == set(), "the launcher has a store"
        asked = {address.rpartition(":")[2] for address in (server.grpc, server.http, server.metrics)}
        assert {port for _, port in listening(psutil.Process(server.head_pid()))} == asked
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        server.wait_gone()
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_no_rank_outlives_a_launcher_that_is_killed_while_ranks_import() -> None:
    command = [sys.executable, "-m", "ppserve", "serve", "--model", "tiny", "--stages", "2"]
    command += ["--port", "0", "--http-port", "0", "--metrics-port", "0"]
    launcher = psutil.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    started: set[psutil.Process] = set()

    def num_ranks() -> int:
        started.update(launcher.children(recursive=True))
        return sum(one.environ().get("RANK") is not None for one in started if one.is_running())

    try:
        wait_until(lambda: num_ranks() == 2)
    finally:
        launcher.kill()
        launcher.wait()
        _, left = psutil.wait_procs(started, timeout=60)
        for one in left:
            one.kill()
    assert not left


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_the_server_of_make_chat_ends_with_it_also_when_it_is_killed() -> None:
    chat = subprocess.Popen([sys.executable, "tools/chat.py", "--model", "tiny"], cwd=ROOT)
    started: set[psutil.Process] = set()

    def num_ranks() -> int:
        started.update(psutil.Process(chat.pid).children(recursive=True))
        return sum(one.environ().get("RANK") is not None for one in started if one.is_running())

    try:
        wait_until(lambda: num_ranks() >= 2)
    finally:
        chat.kill()
        chat.wait()
    wait_until(lambda: not any(one.is_running() for one in started), lambda: f"left behind: {started}")


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_server_whose_output_nobody_reads_starts_and_answers(tmp_path: Path) -> None:
    """The pipe is full before it begins, and what it says comes when there is room. (How much is kept, and that
    the rest is counted, is in `process.test_log`.)"""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading, filling = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        while True:
            os.write(filling, b"\n" * select.PIPE_BUF)
    os.close(filling)
    port = port_to_come_back_to()
    server = launch(Forked(2), ("--port", str(port), "--log-level", "debug"), pipe)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            grpc.channel_ready_future(channel).result(90)
        requests = requests_with_everything(4, seed=8)
        assert ask(f"127.0.0.1:{port}", requests, at_once=4) == [answers[0] for answers in answers_alone(requests)]
        os.set_blocking(reading, True)
        said = b""
        while not (b"ppserve ready" in said and b"stage 1 INFO process" in said):  # in any order
            said += (more := os.read(reading, 1 << 16))
            assert more, "every process has closed its end"
    finally:
        server.end()
        os.close(reading)


def test_a_second_sigterm_ends_at_once() -> None:
    flags = ("--shutdown-timeout", "600")
    with serving(1, *flags, by=Forked) as server, grpc.insecure_channel(server.grpc) as channel:
        stub = GenerationServiceStub(channel)
        stop = pb.StopConditions(max_tokens=1000, ignore_eos=True)
        streams = [stub.Generate(pb.GenerateRequest(text="Once upon a time", stop=stop)) for _ in range(24)]
        next(iter(streams[0]))
        head = server.head_pid()
        os.kill(head, signal.SIGTERM)
        server.wait_for_line("draining")
        os.kill(head, signal.SIGTERM)
        assert {code_at_the_end(stream) for stream in streams} == {grpc.StatusCode.UNAVAILABLE}
        server.wait_exit()
        server.wait_gone()


def code_at_the_end(stream: grpc.Call) -> grpc.StatusCode:
    """The status that a stream ends with: OK where its answer was completed."""
    with suppress(grpc.RpcError):
        for _ in stream:
            pass
    return stream.code()


def refused(tmp_path: Path, stages: int, *arguments: str) -> str:
    """The one line of a server that does not start; its launcher ends with the worst code of its ranks."""
    return refused_by(launch(Forked(stages), arguments, tmp_path / "log"))


def refused_by(server: Server, code: int | None = None) -> str:
    try:
        ended = server.wait_exit(90)
        assert ended == code if code else ended != 0
    finally:
        server.end()
    (line,) = [line for line in server.log.splitlines() if line.startswith("ppserve: error:")]
    return line


@pytest.mark.thorough
@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs an x86-64")
def test_kernels_that_the_cpu_lacks_are_refused_before_anything_is_compiled(tmp_path: Path) -> None:
    """What LLVM is told to have counts: it would end a process that asks for more."""
    told = {"NUMBA_CPU_NAME": "x86-64-v2", "NUMBA_CPU_FEATURES": "+sse4.2", "PPSERVE_CPU_KERNELS": "avx2"}
    line = refused_by(launch(plain_shell(1), [], tmp_path / "log", told), code=2)
    assert line.endswith("PPSERVE_CPU_KERNELS: this CPU cannot run 'avx2' (it can: portable)")


def test_truncated_weights_and_a_port_in_use_are_named(tmp_path: Path) -> None:
    model = Path(shutil.copytree(TINY, tmp_path / "model"))
    weights = model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    assert "model.safetensors" in refused(tmp_path, 2, "--model", str(model))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert re.search(f"--port: .*{port}", refused(tmp_path, 1, "--port", port))
