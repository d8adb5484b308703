"""`ppserve bench`: against a server without a model, and against two real stages."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ppserve.errors import Overloaded
from tests.commands import run
from tests.e2e.serving import Server, wait_until
from tests.fake_engine import FakeEngine, served_in_thread

SMALL = ("--prompt-tokens", "4", "--new-tokens", "5")


def test_two_open_loops_without_a_seed_ask_different_things(target: str, tmp_path: Path) -> None:
    seeds = []
    for _ in range(2):
        flags = (*SMALL, "--rate", "200", "--requests", "4", "--json", str(tmp_path / "out.json"))
        done = run("bench", "--target", target, *flags)
        assert done.returncode == 0, done.stderr
        found = json.loads((tmp_path / "out.json").read_text())
        assert (found["completed"], found["request_rate"]) == (4, 200)
        seeds.append(found["seed"])
        assert f"Seed {seeds[-1]}." in done.stdout
    assert seeds[0] != seeds[1]


@pytest.mark.slow
def test_an_interrupted_run_reports_what_was_answered() -> None:
    engine = FakeEngine()
    with served_in_thread(engine) as target:
        command = [sys.executable, "-m", "ppserve", "bench", "--target", target, *SMALL]
        command += ["--duration", "600", "--concurrency", "2"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            wait_until(lambda: len(engine.requests) >= 20)
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Interrupted" in output
    assert "Failed requests:                         0" in output
    assert re.search(r"Successful requests: +[1-9]", output)


@pytest.mark.slow
def test_on_a_terminal_it_says_that_it_warms_up() -> None:
    terminal, theirs = pty.openpty()
    try:
        with served_in_thread(FakeEngine()) as target:
            command = [sys.executable, "-m", "ppserve", "bench", "--target", target, *SMALL, "--requests", "1"]
            subprocess.run(command, stdout=subprocess.DEVNULL, stderr=theirs, check=True)
        assert os.read(terminal, 4096).startswith(b"warming up with 16 requests")
    finally:
        os.close(terminal)
        os.close(theirs)


def test_failures_are_counted_and_named() -> None:
    with served_in_thread(FakeEngine(refusal=Overloaded("the queue is full", 1.0))) as target:
        done = run("bench", "--target", target, *SMALL, "--requests", "5", "--warm-up", "0", "--rate", "500")
        assert done.returncode == 1
        assert "Failed requests:                         5\n" in done.stdout
        assert "5 of 5 requests failed with RESOURCE_EXHAUSTED" in done.stdout
        warming = run("bench", "--target", target, *SMALL)
        assert warming.returncode == 1
        assert "while warming up" in warming.one_line


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (("--prompt-tokens", "many"), "--prompt-tokens", 2),
        (("--prompt-tokens", "uniform:1:999"), "--prompt-tokens: 999 prompt tokens and 64 new ones are beyond", 2),
        (("--rate", "nan"), "--rate", 2),
        (("--rate", "5", "--concurrency", "2"), "--rate", 2),
        (("--json", "/no/such/place/out.json"), "--json", 2),
        ((*SMALL, "--requests", "1", "--json", "/dev/full"), "--json: cannot write /dev/full", 2),
        (("--target", "127.0.0.1:1"), "UNAVAILABLE", 1),
    ],
)
def test_mistakes_are_one_line(target: str, arguments: tuple[str, ...], words: str, code: int) -> None:
    done = run("bench", "--target", target, *arguments)
    assert done.returncode == code
    assert words in done.one_line


# ---- two real stages -------------------------------------------------------------------------------------------


def test_against_two_real_stages(shared_server: Server, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    flags = ("--concurrency", "4", "--requests", "12", "--warm-up", "2", "--prompt-tokens", "uniform:40:48")
    done = run(
        *("bench", "--target", shared_server.grpc, *flags, "--new-tokens", "uniform:3:8", "--json", str(out))
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert (found["completed"], found["failed"], found["num_prompts"]) == (12, 0, 12)
    assert (found["model_id"], found["num_stages"], found["max_concurrency"]) == ("tiny", 2, 4)
    assert 12 * 40 <= found["total_input_tokens"] <= 12 * 48
    assert 12 * 3 <= found["total_output_tokens"] <= 12 * 8
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert 0 < found[f"median_{name}_ms"] <= found[f"p99_{name}_ms"]
    assert [stage["stage"] for stage in found["stages"]] == [0, 1]
    for stage in found["stages"]:
        assert stage["busy_share"] > 0
        assert stage["busy_share"] + stage["bubble_share"] == pytest.approx(1)
        assert sum(stage["bubble_share_by_cause"].values()) == pytest.approx(stage["bubble_share"])
        wall_s = stage["busy_seconds"] + stage["idle_seconds"] + sum(stage["bubble_seconds"].values())
        assert wall_s > 0.9 * found["duration"]  # the readings embrace the run


def test_top_of_two_real_stages(shared_server: Server) -> None:
    server = ("--target", shared_server.grpc, "--metrics", shared_server.metrics)
    done = run("top", "--once", "--interval", "0.2", *server)
    assert (done.returncode, done.stderr) == (0, "")
    assert "stage 0: busy" in done.stdout
    assert "stage 1: busy" in done.stdout
    assert "running 0  waiting 0" in done.stdout
