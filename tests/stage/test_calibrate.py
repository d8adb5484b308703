"""Costs of the model's parts: sensible, measured once, remembered, and never in the way of a start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ppserve.core.partition import TokenCosts
from ppserve.model.checkpoint.opening import open_checkpoint
from ppserve.stage.calibrate import token_costs
from ppserve.stage.device import Compute

COMPUTE = Compute(torch.device("cpu"), "float32", False, 1)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ppserve"


def test_every_part_costs_something_and_is_remembered(cache: Path) -> None:
    costs = token_costs(open_checkpoint("tiny"), COMPUTE, context=64)
    for parts in (costs.prefill, costs.decode):
        assert parts.block > 0
        assert parts.head > 0
        assert parts.embedding >= 0
    (remembered,) = cache.glob("costs-*.json")
    # Another measurement would never give the same seconds to the last bit.
    assert token_costs(open_checkpoint("tiny"), COMPUTE, context=64) == costs
    token_costs(open_checkpoint("tiny"), COMPUTE, context=128)
    assert len(list(cache.glob("costs-*.json"))) == 2
    assert remembered.exists()


@pytest.mark.parametrize("damage", ["", "{}", "[1, 2]", '{"prefill": {"block": 1}}'])
def test_a_damaged_memory_is_measured_again(cache: Path, damage: str) -> None:
    token_costs(open_checkpoint("tiny"), COMPUTE, context=64)
    (remembered,) = cache.glob("costs-*.json")
    remembered.write_text(damage)
    assert isinstance(token_costs(open_checkpoint("tiny"), COMPUTE, context=64), TokenCosts)


def test_a_cache_that_cannot_be_written_is_done_without(cache: Path) -> None:
    cache.parent.joinpath("ppserve").write_text("a file where the directory should be")
    assert isinstance(token_costs(open_checkpoint("tiny"), COMPUTE, context=64), TokenCosts)
