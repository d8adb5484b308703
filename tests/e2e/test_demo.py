"""The tour: whole, under torchrun, and what it says when it cannot be taken."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import demo
from tests.forking import ForkedLauncher
from tour.pictures import read_trace
from tour.ranks import start_ranks
from tour.schedule import Schedule

ROOT = Path(demo.__file__).parent
TITLES = [f"{number}. {title}" for number, (title, _) in demo.PARTS.items()]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_the_whole_tour_with_its_own_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "demo.py", "--force-cpu", "--plot", str(tmp_path)]
    ended = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=280, check=False
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    told = ended.stdout
    assert [line for line in told.splitlines() if line in TITLES] == TITLES
    assert "Largest difference from the same model in one process: 0.0\n" in told
    assert "Largest difference between the outputs for any two m: 0.0\n" in told
    assert told.count("\nSeen: ") == len(TITLES)
    assert "The same tokens in all shapes: yes\n" in told
    assert "[kill -9 stage 1]" in told
    # On a busy machine the reader may be so late that the stage dies after the answer: the tour says so.
    was_late = "epoch 1 of the pipeline" in told and "this machine is busy" in " ".join(told.split())
    assert "epoch 2 of the pipeline" in told or was_late, told[told.index("[kill -9 stage 1]") :]
    pictures = sorted(path.name for path in tmp_path.iterdir())
    assert pictures == ["efficiency.png", "memory.png", "schedule.png", "timeline.png"]
    assert pictures == sorted(path.name for path in (ROOT / "docs/pictures").iterdir())
    for path in tmp_path.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 5_000


@pytest.mark.timeout(200)
def test_three_ranks_of_torchrun_speak_in_order(tmp_path: Path) -> None:
    ranks = ["--standalone", "--local-addr=127.0.0.1", "--nproc_per_node=3"]
    (log := tmp_path / "log").touch()
    tour = [*ranks, str(ROOT / "demo.py"), "--force-cpu", "--only", "1"]
    torchrun = ForkedLauncher("run_torchrun", tour, ENVIRONMENT, log)
    assert torchrun.wait(180) == 0, log.read_text()[-4000:]
    told = log.read_text()
    owners = re.findall(r"^  stage (\d) on cpu: (.*); [\d,]+ parameters; hears (.*), speaks to (.*)$", told, re.M)
    assert [stage for stage, *_ in owners] == ["0", "1", "2"]
    assert ["embeddings" in parts for _, parts, *_ in owners] == [True, False, False]
    assert ["LM head" in parts for _, parts, *_ in owners] == [False, False, True]
    assert [hears for *_, hears, _ in owners] == ["nobody", "rank 0", "rank 1"]
    assert [speaks for *_, speaks in owners] == ["rank 1", "rank 2", "nobody"]
    assert "Largest difference from the same model in one process: 0.0\n" in told


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--stages", "9"], "--stages: 9 stages cannot share 8 layers (tiny)"),
        (["--stages", "1"], "--stages: 1 is no pipeline"),
        (["--model", "nowhere/at/all"], "nowhere/at/all"),
        (["--port", "70000"], "--port: 70000 is not between 0 and 65535"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], says: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--force-cpu", *arguments]) == 1
    complaint = capfd.readouterr().err
    assert complaint.startswith("demo: ")
    assert complaint.count("\n") == 1
    assert says in complaint


def test_what_cannot_be_used_here_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "pictures"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert demo.main(["--force-cpu", "--port", port]) == 1
    assert demo.main(["--force-cpu", "--plot", str(folder)]) == 1
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert demo.main(["--force-cpu", "--plot", str(tmp_path)]) == 1
    in_use, not_writable, missing = capfd.readouterr().err.splitlines()
    assert in_use.startswith(f"demo: --port: {port} cannot be used: ")
    assert not_writable.startswith(f"demo: --plot: cannot write to {folder}: ")
    assert missing == "demo: --plot needs matplotlib: pip install 'ppserve[plot]'"


def test_ranks_end_together() -> None:
    """One rank fails, the other would wait for ever."""
    play = "import os, sys, time; sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(1000)"
    assert start_ranks(2, [sys.executable, "-c", play]) == 3


# Microbatch k on stage s takes one unit from k + s on: GPipe's own picture.
PERFECT = Schedule(4, [[((k + s) * 10, (k + s + 1) * 10) for k in range(4)] for s in range(3)])


def test_a_perfect_schedule_has_the_ideal_bubble_and_is_drawn_to_scale() -> None:
    assert PERFECT.wall == 60
    assert PERFECT.bubble == pytest.approx(PERFECT.ideal_bubble) == pytest.approx(2 / 6)
    assert PERFECT.rows(12) == ["00112233....", "..00112233..", "....00112233"]


def test_a_trace_that_broke_off_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for text in ('[\n{"ph":"M"},\n{"ph":"X"}', '[\n{"ph":"M"},\n{"ph":"X"},\n', '[\n{"ph":"M"},\n{"ph":"X"}\n]\n'):
        path.write_text(text)
        assert [event["ph"] for event in read_trace(path)] == ["M", "X"]
