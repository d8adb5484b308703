"""The checked-in stubs are what the pinned generator makes of the proto."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_stubs_are_current() -> None:
    command = [sys.executable, str(ROOT / "tools" / "generate_stubs.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
