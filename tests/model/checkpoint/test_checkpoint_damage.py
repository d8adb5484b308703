"""Some hundreds of damaged files: a one-line refusal or a model, never anything else.

Thousands of the same are run by hand: benchmarks/checkpoints.py fuzz.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model.checkpoint.damage import attempt, damaged, write_originals

FORMATS = ("safetensors", "safetensors in parts", "bin", "bin in parts", "legacy bin", "llm.c", "nanoGPT")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_originals(tmp_path_factory.mktemp("originals"))


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_checkpoints(originals: dict[str, Path], tmp_path: Path, name: str) -> None:
    assert attempt(originals[name]) is None, "the control: undamaged, it loads"
    refusals = [attempt(damaged(originals[name], tmp_path, seed)) for seed in range(60)]
    assert any(refusals)
