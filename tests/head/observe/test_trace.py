import json
import os
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from ppserve.core.grid import RankGrid
from ppserve.core.ledger.account import Settled
from ppserve.core.ledger.causes import Span
from ppserve.core.ledger.steps import Steps
from ppserve.core.plan import Draw, Slice, StepPlan, StepResult, StepStamps
from ppserve.core.request import SamplingParams
from ppserve.errors import ConfigError
from ppserve.head.observe.trace import Trace


def plan(step_id: int) -> StepPlan:
    return StepPlan(1, step_id, 0, (Slice(0, 0, (7,), (0,), Draw(SamplingParams())),))


def run_step(trace: Trace, step_id: int, num_stages: int = 3) -> None:
    steps = Steps(num_stages)
    step = steps.sent(plan(step_id), 0, 0, num_slots=1)
    for stage in range(num_stages):
        begun = 10_000 * (step_id + stage)
        stamps = StepStamps(0, begun, begun, begun, begun + 8_000, begun + 9_000)
        steps.reported(StepResult(epoch=1, step_id=step_id, stage=stage, stamps=stamps), begun + 9_000)
        trace.on_step_reported(0, step, stage)


def test_steps_arrows_waits_and_counters(tmp_path):
    path = tmp_path / "trace.json"
    trace = Trace(RankGrid(1, 1, 3), path)
    run_step(trace, 7)
    trace.on_span_settled(0, Settled(2, Span(40_000, 90_000, "imbalance"), 7))
    trace.on_span_settled(0, Settled(2, Span(90_000, 98_000, "decode"), 7))
    trace.on_span_settled(0, Settled(2, Span(98_000, 99_000, "idle"), None))
    trace.on_load(0, SimpleNamespace(num_running=3, kv_usage=0.5), 1, 2)
    trace.stop()
    events = json.loads(path.read_text())
    steps = {e["name"]: e for e in events if e["ph"] == "X" and e["cat"] == "decode"}
    assert set(steps) == {"0F7", "1F7", "2F7"}
    assert (steps["2F7"]["pid"], steps["2F7"]["ts"], steps["2F7"]["dur"]) == (2, 90, 8)
    assert steps["2F7"]["args"] == {"phase": "decode", "tokens": 1, "slices": 1, "slot": 0}
    assert [(e["name"], e["dur"]) for e in events if e.get("cat") == "bubble"] == [("imbalance", 50)]
    begins = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert set(begins) == set(ends) == {"0.7.0", "0.7.1"}
    for link, begin in begins.items():
        assert ends[link]["pid"] == begin["pid"] + 1
        sender, receiver = (steps[f"{end['pid']}F7"] for end in (begin, ends[link]))
        assert begin["ts"] == sender["ts"] + sender["dur"]
        assert ends[link]["ts"] == receiver["ts"]
    counters = {e["name"]: e["args"] for e in events if e["ph"] == "C"}
    assert counters == {"sequences": {"running": 3, "waiting": 2}, "KV use": {"ratio": 0.5}}
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "stage 0", 1: "stage 1", 2: "stage 2", 3: "head"}


def test_a_file_stops_at_its_limit_and_one_cut_off_before_lacks_only_its_bracket(tmp_path):
    path = tmp_path / "trace.json"
    trace = Trace(RankGrid(1, 1, 2), path, max_bytes=200_000)
    num_cut_off = 0
    for step_id in range(1000):
        run_step(trace, step_id, num_stages=2)
        if trace.is_on and path.stat().st_size:
            num_cut_off += len(json.loads(path.read_text() + "]")) > 10
    assert num_cut_off > 0
    assert not trace.is_on
    assert 200_000 <= path.stat().st_size < 201_000
    assert Counter(e["ph"] for e in json.loads(path.read_text()))["X"] > 50


def test_it_can_be_switched_while_serving(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trace = Trace(RankGrid(1, 1, 1), None)
    run_step(trace, 1, num_stages=1)
    assert list(tmp_path.iterdir()) == []
    for step_id in (2, 3):
        trace.toggle()
        trace.start()  # which changes nothing
        run_step(trace, step_id, num_stages=1)
        trace.toggle()
    files = sorted(tmp_path.iterdir(), key=lambda file: len(file.name))
    found = [[e["name"] for e in json.loads(f.read_text()) if e["ph"] == "X"] for f in files]
    assert found == [["0F2"], ["0F3"]]


def test_switching_in_one_thread_while_another_writes(tmp_path):
    trace = Trace(RankGrid(1, 1, 2), tmp_path / "t.json")
    done = threading.Event()

    def write() -> None:
        step_id = 0
        while not done.is_set():
            run_step(trace, step_id := step_id + 1, num_stages=2)

    writer = threading.Thread(target=write)
    writer.start()
    for _ in range(20):
        trace.toggle()
    done.set()
    writer.join()
    trace.stop()
    files = list(tmp_path.iterdir())
    assert len(files) == 11
    for file in files:
        json.loads(file.read_text())


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"--trace: cannot write .*nowhere.*No such file"):
        Trace(RankGrid(1, 1, 1), tmp_path / "nowhere" / "trace.json")


def test_a_full_disk_ends_the_trace_and_nothing_else():
    trace = Trace(RankGrid(1, 1, 1), Path("/dev/full"))
    assert _descriptors_of("/dev/full")
    for step_id in range(1000):
        run_step(trace, step_id, num_stages=1)
    assert not trace.is_on
    assert not _descriptors_of("/dev/full")


def _descriptors_of(path: str) -> list[str]:
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return [link for link in links if os.path.lexists(link) and os.readlink(link) == path]
