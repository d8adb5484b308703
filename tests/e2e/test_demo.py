"""The tour: whole, under torchrun, and what it says when it cannot be taken."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

import demo
from tests.forking import ForkedLauncher
from tour.gain import Gain
from tour.gain import lesson as gain_lesson
from tour.pictures import Pictures, read_trace
from tour.ranks import start_ranks
from tour.rounds import median, spread
from tour.schedule import Schedule, lesson
from tour.server import WatchedStream, _watch_start

ROOT = Path(demo.__file__).parent
TITLES = [f"{number}. {part.title}" for number, part in demo.PARTS.items()]
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
    assert told.count("\nSeen: ") == told.count("  To try: ") == told.count("  The code: ") == len(TITLES)
    assert "The same tokens in all shapes: yes\n" in told
    assert "[kill -9 stage 1]" in told
    # On a busy machine the reader may be so late that the stage dies after the answer: the tour says so.
    was_late = "epoch 1 of the pipeline" in told and "this machine is busy" in " ".join(told.split())
    assert "epoch 2 of the pipeline" in told or was_late, told[told.index("[kill -9 stage 1]") :]
    pictures = sorted(path.name for path in tmp_path.iterdir())
    assert pictures == ["callers.png", "efficiency.png", "memory.png", "schedule.png", "timeline.png"]
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
    assert missing == "demo: --plot needs matplotlib: pip install matplotlib"


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


def stretched(m: int, step: int, wait: int) -> Schedule:
    """Two stages that compute m steps each, with a wait between steps."""
    each = step + wait
    return Schedule(m, [[(k * each + stage, k * each + stage + step) for k in range(m)] for stage in range(2)])


def test_what_schedules_teach_is_what_they_show() -> None:
    """The quickest m is named, and why the largest is slower: for its computing, or else for its waiting."""
    ms = 1_000_000
    one, two, four = stretched(1, 100 * ms, 0), stretched(2, 40 * ms, 0), stretched(4, 30 * ms, 0)
    assert "with 2 they work at once, 80.0 ms. More is not always better: m = 4 takes 120.0 ms" in lesson(
        [one, two, four]
    )
    assert lesson([one, two, four]).endswith("because its smaller steps compute for 50% longer in all.")
    waits = stretched(4, 20 * ms, 10 * ms)
    assert "because its stages stand still for" in lesson([one, two, waits])
    assert lesson([one, two]).endswith("with 2 they work at once, 80.0 ms.")
    assert lesson([two, stretched(4, 30 * ms, 0)]).startswith("here one microbatch is the quickest, 80.0 ms")


def test_what_callers_teach_is_what_they_show() -> None:
    gains = [Gain(1, 100, 90), Gain(8, 200, 300), Gain(32, 300, 600)]
    assert gain_lesson(gains, 2).startswith("32 callers get 2.0 times as many tokens from 2 stages as from one, ")
    assert "one caller gets no more" in gain_lesson(gains, 2)
    assert gain_lesson([Gain(1, 100, 120), *gains[1:]], 2).endswith("and one caller gets 1.2 times as many.")
    assert gain_lesson([Gain(1, 100, 150), Gain(8, 200, 210)], 2) == (
        "one caller gets 1.5 times as many tokens from 2 stages as from one."
    )
    slow = gain_lesson([Gain(1, 100, 80), Gain(8, 200, 210)], 4)
    assert slow.startswith("4 stages were nowhere faster than one (1.05 times at best)")


def test_a_median_is_a_run_and_a_spread_a_share_of_it() -> None:
    assert (median([3, 1, 2], float), median(["ccc", "a", "bb"], len)) == (2, "bb")
    assert (spread([1.0, 2.0, 1.5]), spread([0.0, 0.0, 0.0])) == (pytest.approx(2 / 3), 0)


def test_every_part_leads_to_its_code() -> None:
    for part in demo.PARTS.values():
        assert [path for path in part.code.split() if not (ROOT / path).is_file()] == []
        for path in re.findall(r"\S+/\S+\.py", part.exercise):
            assert (ROOT / path).is_file(), part.exercise
        assert set(re.findall(r"--[a-z-]+", part.exercise)) <= {"--stages", "--only"}


def test_the_pictures_say_what_they_show(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    said: list[str] = []

    class Noting(Pictures):
        def _save(self, figure: Any, name: str) -> Path:
            said.extend(panel.get_title(loc="left") for panel in figure.axes)
            return super()._save(figure, name)

    ms = 1_000_000
    schedules = [stretched(1, 100 * ms, 0), stretched(2, 30 * ms, 0)]
    pictures = Noting(tmp_path)
    pictures.schedules(schedules)
    pictures.memory({"1B": [8.0, 4.0], "13B": [50.0, 25.5]}, (1, 2))
    pictures.efficiency(schedules, {1: 100.0, 2: 190.0, 3: 200.0})
    pictures.callers([Gain(1, 100, 90), Gain(32, 300, 600)], 2)
    (tmp_path / "trace").write_text("[]")
    streams = {"undisturbed": WatchedStream("", [0.1, 0.2, 0.3]), "hurt": WatchedStream("", [0.1, 1.6, 1.7])}
    pictures.timeline(streams, tmp_path / "trace")
    assert said[:7] == [
        "1 microbatch: 100 ms",
        "2 microbatches: 60 ms, 60% of the time of one",
        "13B needs 50 GiB on one device, and at most 25.5 on each of 2 (bfloat16, 32 x 1,024 tokens)",
        "Stages stand still: 0% with one microbatch, 0% with 2",
        "2 sequences on 2 stages: 1.9 times the tokens of one",
        "2 stages beside one: times the tokens, 0.9 for 1, 2.0 for 32 callers",
        "A killed stage costs a pause of 1.5 s, and no token",
    ]
    assert {path.name for path in tmp_path.glob("*.png")} == {
        f"{name}.png" for name in ("schedule", "memory", "efficiency", "callers", "timeline")
    }


def test_a_trace_that_broke_off_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for text in ('[\n{"ph":"M"},\n{"ph":"X"}', '[\n{"ph":"M"},\n{"ph":"X"},\n', '[\n{"ph":"M"},\n{"ph":"X"}\n]\n'):
        path.write_text(text)
        assert [event["ph"] for event in read_trace(path)] == ["M", "X"]


def test_a_start_is_watched_whose_log_is_no_text(tmp_path: Path) -> None:
    (log := tmp_path / "log").write_bytes(b"/cache/\xff\nstarting, 3 s: importing\n")
    told, is_ready = list[str](), threading.Event()

    def tell(line: str) -> None:
        told.append(line)
        is_ready.set()

    process: Any = None  # it is not to be killed
    _watch_start(process, log, is_ready, tell)
    assert told == ["starting, 3 s: importing"]


RANK = """
import os, signal, time
from tour.ranks import obey_starter
obey_starter()
try:
    print("begun", flush=True)
    while True:
        time.sleep(0.05)  # a signal before one long pause would be noticed after it
except KeyboardInterrupt:
    signal.raise_signal(signal.SIGTERM)  # as the kernel does for each thread of a starter that is killed
    print("rank", os.environ["RANK"], "in order", flush=True)
"""
STARTER = """
import sys
from tour.ranks import start_ranks
sys.exit(start_ranks(2, [sys.executable, "-c", sys.argv[1]]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
@pytest.mark.parametrize(
    ("ending", "to_all"),
    [(signal.SIGINT, True), (signal.SIGHUP, True), (signal.SIGTERM, False), (signal.SIGKILL, False)],
)
def test_ranks_end_with_the_tour_and_the_first_in_order(ending: signal.Signals, to_all: bool) -> None:
    """to_all: whether each rank gets the signal too, as from a terminal. The pipe ends with the last that holds
    it."""
    command = [sys.executable, "-c", STARTER, RANK]
    begun = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert begun.stdout is not None
    assert [begun.stdout.readline() for _ in range(2)] == ["begun\n"] * 2
    (os.killpg if to_all else os.kill)(begun.pid, ending)
    told, errors = begun.communicate(timeout=60)
    assert (told, errors) == ("rank 0 in order\n", "")
    assert begun.returncode == (-ending if ending == signal.SIGKILL else 128 + ending)


SERVER = """#!/bin/sh
case "$1" in -IS) exec {python} "$@";; esac
echo ppserve ready grpc=here
exec sleep 600
"""
RANK_WITH_SERVER = """
import sys
from tour.server import serving
sys.executable = sys.argv[1]
with serving([], print) as server:
    print(server.process.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_the_server_of_the_tour_ends_with_it_also_when_it_is_killed(tmp_path: Path) -> None:
    (fake := tmp_path / "python").write_text(SERVER.format(python=sys.executable))
    fake.chmod(0o755)
    command = [sys.executable, "-c", RANK_WITH_SERVER, str(fake)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        server = psutil.Process(int(rank.stdout.readline()))
        rank.kill()
    server.wait(60)
