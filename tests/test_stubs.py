"""The checked-in stubs are what their tool makes of the proto."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parent.parent / "tools/generate_stubs.py"


def test_what_is_made_from_the_proto_is_current() -> None:
    command = [sys.executable, str(TOOL), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
