"""The checked-in stubs are what the pinned generator makes of the proto."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_stubs_are_current(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "generate_stubs.py"), "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    made = {path.name: path.read_bytes() for path in (tmp_path / "ppserve" / "v1").iterdir()}
    kept = {path.name: path.read_bytes() for path in (ROOT / "ppserve" / "v1").glob("*_pb2*")}
    assert made.keys() == kept.keys()
    for name, content in made.items():
        assert content == kept[name], f"{name} is out of date: run tools/generate_stubs.py"
