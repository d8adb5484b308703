"""Runs a client's program as on a machine without a network."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

WITHIN_S = 600
_ALONE = dict.fromkeys(
    ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_NO_USAGE_STATS"), "1"
)


def run(command: Sequence[str], folder: Path, **variables: str) -> str:
    """What the program prints. Its caches lie in `folder`. Raises SystemExit with its last words when it fails."""
    # The checkout is not on its path: it must not import what is installed for us.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {**inherited, **_ALONE, "HF_HOME": str(folder / "hf"), **variables}
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=WITHIN_S,
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout
