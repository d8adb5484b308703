"""`ppserve bench` as a process: against a server without a model, and against two real stages."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppserve.bench.plot import draw, read_spans
from ppserve.bench.summary import Measurement, summarize
from ppserve.errors import ConfigError, Overloaded
from tests.bench.answers import LEDGER, SETTING, answer, failed
from tests.bench.terminal import Terminal
from tests.e2e.serving import Server
from tests.fake_engine import FakeEngine, served_in_thread

PNG = b"\x89PNG\r\n\x1a\n"


def bench(target: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ppserve", "bench", "--target", target, *arguments],
        capture_output=True, text=True, timeout=100, env={**os.environ, **environment},
    )  # fmt: skip


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    with served_in_thread(FakeEngine()) as target:
        yield target


@pytest.mark.slow
def test_a_closed_loop_with_the_smallest_of_flags(target: str, tmp_path: Path) -> None:
    flags = ("--concurrency", "3", "--prompt-tokens", "uniform:2:9", "--new-tokens", "5", "--details")
    done = bench(target, *flags, "--json", str(tmp_path / "out.json"), "--goodput", "ttft:9000", "tpot:9000")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Request goodput (req/s):" in done.stdout
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (16, 0, 80)
    assert found["total_input_tokens"] == sum(found["input_lens"])
    assert found["output_lens"] == [5] * 16
    assert len(set(found["input_lens"])) > 1
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])


@pytest.mark.slow
def test_a_sweep(target: str, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("out.csv", "out.png", "out.json")]
    flags = ("--sweep", "1,4", "--requests", "6", "--new-tokens", "3", "--prompt-tokens", "4")
    outputs = [part for file in files for part in (f"--{file.suffix.strip('.')}", str(file))]
    done = bench(target, *flags, *[part.replace("--png", "--plot") for part in outputs])
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["concurrency", "1", "4"]
    with files[0].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["max_concurrency"], row["completed"]) for row in rows] == [("1", "6"), ("4", "6")]
    assert files[1].read_bytes().startswith(PNG)
    assert [run["total_output_tokens"] for run in json.loads(files[2].read_text())] == [18, 18]


@pytest.mark.slow
def test_an_open_loop_over_a_trace(target: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.00,7,2\n2023-11-16 18:15:46.10,900,3\n2023-11-16 18:15:46.20,8,4\n"
    )
    out = tmp_path / "out.json"
    done = bench(target, "--trace", str(trace), "--time-scale", "2", "--json", str(out), "--details")
    assert done.returncode == 0, done.stderr
    assert "1 of 3 requests were longer than the context" in done.stdout
    found = json.loads(out.read_text())
    assert found["request_rate"] == pytest.approx(20)
    assert found["input_lens"] == [7, 61, 8]
    assert found["output_lens"] == [2, 3, 4]


@pytest.mark.slow
def test_progress_on_a_terminal_leaves_no_trace(target: str) -> None:
    flags = ("--requests", "40", "--concurrency", "2", "--prompt-tokens", "4", "--new-tokens", "40")
    terminal = Terminal([sys.executable, "-m", "ppserve", "bench", "--target", target, *flags])
    try:
        terminal.read_rest()
        assert terminal.process.wait(30) == 0
    finally:
        terminal.close()
    drawn, _, report = terminal.seen.partition("\r\x1b[K=====")
    assert "2 callers [" in drawn
    assert "/40 requests" in drawn
    assert "in flight" not in report


@pytest.mark.slow
def test_an_interrupted_run_reports_what_was_answered(target: str) -> None:
    flags = ("--duration", "600", "--concurrency", "2", "--prompt-tokens", "4", "--new-tokens", "40")
    terminal = Terminal([sys.executable, "-m", "ppserve", "bench", "--target", target, *flags])
    try:
        terminal.read_until(r"\] [1-9]\d* requests")
        terminal.process.send_signal(signal.SIGINT)
        terminal.read_rest()
        assert terminal.process.wait(30) == 130
    finally:
        terminal.close()
    assert "Traceback" not in terminal.seen
    assert "Interrupted" in terminal.seen
    assert "Failed requests:                         0" in terminal.seen
    match = re.search(r"Successful requests: +(\d+)", terminal.seen)
    assert match is not None
    assert int(match[1]) > 0


@pytest.mark.slow
def test_two_runs_without_a_seed_ask_different_things(target: str, tmp_path: Path) -> None:
    seeds = []
    for _ in range(2):
        done = bench(target, "--requests", "2", "--new-tokens", "2", "--json", str(tmp_path / "out.json"))
        assert done.returncode == 0, done.stderr
        seeds.append(json.loads((tmp_path / "out.json").read_text())["seed"])
        assert f"Seed {seeds[-1]}." in done.stdout
    assert seeds[0] != seeds[1]


@pytest.mark.slow
def test_failures_are_counted_and_named() -> None:
    with served_in_thread(FakeEngine(refusal=Overloaded("the queue is full", 1.0))) as target:
        flags = ("--requests", "5", "--prompt-tokens", "4", "--new-tokens", "2")
        done = bench(target, *flags, "--warm-up", "0", "--rate", "500")
        assert done.returncode == 1
        assert "Failed requests:                         5\n" in done.stdout
        assert "5 of 5 requests failed with RESOURCE_EXHAUSTED" in done.stdout
        warming = bench(target, *flags)
        assert warming.returncode == 1
        assert "while warming up" in warming.stderr
        assert len(warming.stderr.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prompt-tokens", "many"), "--prompt-tokens"),
        (("--sweep", "1,2", "--rate", "5"), "--sweep"),
        (("--rate", "nan"), "--rate"),
        (("--rate", "5", "--burstiness", "inf"), "--burstiness"),
        (("--plot", "picture.foo"), "--plot"),
        (("--goodput", "itl:5"), "--goodput"),
        (("ttft:500",), "ttft:500"),
        (("--stage-trace", __file__), "--plot"),
        (("--json", "/no/such/place/out.json"), "--json"),
        (("--trace", __file__), "--trace"),
    ],
)
def test_mistakes_are_one_line(target: str, arguments: tuple[str, ...], words: str) -> None:
    done = bench(target, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert words in done.stderr


@pytest.mark.slow
def test_what_cannot_be_written_is_named_after_the_report(target: str) -> None:
    done = bench(target, "--requests", "1", "--warm-up", "0", "--csv", "/dev/full")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "ppserve: error: --csv: cannot write /dev/full: No space left on device"
    assert "Request throughput" in done.stdout


@pytest.mark.slow
def test_nobody_there() -> None:
    done = bench("127.0.0.1:1")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "UNAVAILABLE" in done.stderr


# ---- pictures --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_picture_of_one_run_and_of_nothing(tmp_path: Path) -> None:
    for number, answers in enumerate(((answer(0, 1.0, [(1.5, 1), (1.6, 2)]),), (failed(0, 1.0, 2.0),))):
        measured = Measurement(SETTING, answers, 10.0, LEDGER if number == 0 else ())
        file = tmp_path / f"{number}.png"
        draw(file, [summarize(measured)], [measured], None)
        assert file.read_bytes().startswith(PNG)


def test_a_trace_that_is_being_written_can_be_read(tmp_path: Path) -> None:
    step = {"ph": "X", "name": "0F7", "cat": "decode", "pid": 0, "tid": 0, "ts": 2000.0, "dur": 500.0}
    wait = {"ph": "X", "name": "host", "cat": "bubble", "pid": 1, "tid": 1, "ts": 1000.0, "dur": 250.0}
    file = tmp_path / "trace.json"
    for text in (f"[\n{json.dumps(step)},\n{json.dumps(wait)}", f"[{json.dumps(step)},\n{json.dumps(wait)},\n"):
        file.write_text(text)
        first, second = read_spans(file)
        assert (first.stage, first.kind, first.start_s, first.duration_s) == (1, "host", 0.001, 0.00025)
        assert (second.stage, second.kind) == (0, "decode")
    for text in ("", "[]", "{}", "hello", '[{"ph":"X"}]'):
        file.write_text(text)
        with pytest.raises(ConfigError, match="--stage-trace"):
            read_spans(file)


# ---- two real stages -------------------------------------------------------------------------------------------


def test_against_two_real_stages(shared_server: Server, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = bench(
        shared_server.grpc, "--metrics", shared_server.metrics, "--concurrency", "4", "--requests", "12",
        "--warm-up", "2", "--prompt-tokens", "16", "--shared-prefix", "32", "--new-tokens", "uniform:3:8",
        "--details", "--json", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert (found["completed"], found["failed"], found["num_prompts"]) == (12, 0, 12)
    assert (found["model_id"], found["num_stages"], found["max_concurrency"]) == ("tiny", 2, 4)
    assert found["total_input_tokens"] == 12 * 48
    assert found["total_output_tokens"] == sum(found["output_lens"]) == found["server"]["generated_tokens"]
    assert found["server"]["cached_prompt_tokens"] > 0
    assert found["max_concurrent_requests"] <= 4
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert 0 < found[f"median_{name}_ms"] <= found[f"p99_{name}_ms"]
    assert found["mean_e2el_ms"] > found["mean_ttft_ms"] > found["server"]["mean_ttft_ms"] > 0
    assert [stage["stage"] for stage in found["stages"]] == [0, 1]
    for stage in found["stages"]:
        assert stage["busy_share"] > 0
        assert stage["busy_share"] + stage["bubble_share"] == pytest.approx(1)
        assert sum(stage["bubble_share_by_cause"].values()) == pytest.approx(stage["bubble_share"])
        wall_s = stage["busy_seconds"] + stage["idle_seconds"] + sum(stage["bubble_seconds"].values())
        assert wall_s > 0.9 * found["duration"]  # the readings embrace the run


def test_top_of_two_real_stages(shared_server: Server) -> None:
    command = [sys.executable, "-m", "ppserve", "top", "--once", "--interval", "0.2"]
    command += ["--target", shared_server.grpc, "--metrics", shared_server.metrics]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "stage 0: busy" in done.stdout
    assert "stage 1: busy" in done.stdout
    assert "running 0  waiting 0" in done.stdout
