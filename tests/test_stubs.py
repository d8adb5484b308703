"""What is made from the proto and checked in is what its tools make of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parent.parent / "tools"


@pytest.mark.parametrize("tool", ["generate_stubs.py", "make_api_docs.py"])
def test_what_is_made_from_the_proto_is_current(tool: str) -> None:
    command = [sys.executable, str(TOOLS / tool), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
