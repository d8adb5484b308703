"""`pytest --as-gpu tests/e2e`: all stages compute as GPUs do, on the GPUs that are here, else on CPUs by reference
operators."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch

from ppserve.stage.device import REFERENCE

# Few rows, since every size of a step is recorded when serving begins; little memory, since tests share a GPU.
SETTINGS = {"batch_invariant": True, "max_num_seqs": 32, "kv_cache_memory": 256_000_000}

_chosen = False


def choose() -> None:
    """Choose so for this process, and for every server that is started from it."""
    global _chosen
    _chosen = True
    os.environ |= {REFERENCE: "1", **{f"PPSERVE_{name.upper()}": str(int(of)) for name, of in SETTINGS.items()}}


def settings() -> dict[str, int]:
    """Return the settings of a `Pipeline` that answers as the servers do."""
    return SETTINGS if _chosen else {}


def flags(arguments: Sequence[str]) -> list[str]:
    """What a server needs beside its arguments. Skips a test of what GPUs refuse."""
    if _chosen and "int8" in arguments:
        pytest.skip("GPUs refuse int8")
    return [] if _chosen and torch.cuda.is_available() else ["--force-cpu"]
