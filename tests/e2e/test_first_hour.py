"""docs/first-hour.md does what it says: its commands run in the printed order against a server of two stages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.e2e.serving import Forked, Server, serving
from tests.test_documents import ALL_BLOCKS, Block

BLOCKS = [block for block in ALL_BLOCKS if block.place.startswith("docs/first-hour.md") and not block.reason]


def run(block: Block, server: Server, directory: Path) -> str:
    """What a block prints in a shell whose `pgrep` finds the stages of this server alone."""
    lines = re.findall(r"^\$ (.+)$", block.text, re.MULTILINE)
    script = "\n".join(lines).replace("localhost:8000", server.http).replace("localhost:9400", server.metrics)
    script = script.replace("ppserve top", f"ppserve top --metrics {server.metrics}")
    finder = directory / "bin" / "pgrep"
    finder.parent.mkdir(exist_ok=True)
    finder.write_text(f"#!/bin/sh\n[ \"$*\" = '-n -x ppserve.stage' ] && echo {server.stage_pid(1)}\n")
    finder.chmod(0o755)
    path = f"{finder.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script],
        cwd=directory, env={**os.environ, "PATH": path, "PPSERVE_TARGET": server.grpc},
        capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, (script, done.stdout, done.stderr)
    return done.stdout


@pytest.mark.timeout(300)
def test_the_first_hour_ends_with_a_killed_stage_an_equal_answer_and_a_ledger_that_sums(tmp_path: Path) -> None:
    with serving(2, by=Forked) as server:
        printed = {block.text: run(block, server, tmp_path) for block in BLOCKS}
        restarts = server.metric("ppserve_stage_restarts_total")
    (killing,) = (text for text in printed if "kill -9" in text)
    assert printed[killing].splitlines()[-1] == "identical"
    assert len((tmp_path / "calm.txt").read_text()) > 1000
    assert restarts == 1
    (answers,) = (output for text, output in printed.items() if "--max-tokens 60 --seed 7" in text)
    assert re.fullmatch(r"(?s).{40,}?(.{40,})\1", answers), "the last two of three answers are equal"
    (ledger,) = (output for text, output in printed.items() if "/metrics" in text)
    sums: dict[str, float] = defaultdict(float)
    for stage, seconds in re.findall(r'stage="(\d)".* (\S+)$', ledger, re.MULTILINE):
        sums[stage] += float(seconds)
    assert len(sums) == 2
    assert sums["0"] == pytest.approx(sums["1"], rel=1e-6)
