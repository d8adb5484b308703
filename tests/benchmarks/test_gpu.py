"""The script that is run on a GPU, `benchmarks/gpu.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import LIMITS_S

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_script_runs_as_the_page_says(tmp_path: Path) -> None:
    """A lent GPU is there for minutes: what can fail before it is needed fails here."""
    command = [sys.executable, "benchmarks/gpu.py", "waits", "invariance", "--json", str(tmp_path / "found")]
    command += ["--device", "cpu", "--small", "--dtype", "float32"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found").read_text())
    assert [(of["waits"], of["at_most_one_wait"]) for of in found["waits"]] == [(0, True)] * 6
    assert found["invariance"][-1]["prompt_in_chunks"]
    assert sum(LIMITS_S.values()) < 570, "of the 600 s that one command may take"
