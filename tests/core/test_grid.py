"""How the ranks of a world are divided."""

from __future__ import annotations

import pytest

from ppserve.config import PipelineSettings
from ppserve.core.grid import RankGrid
from ppserve.errors import ConfigError


def test_stages_are_what_tensor_ranks_and_replicas_leave() -> None:
    assert PipelineSettings(tensor_parallel=2, replicas=2).grid(12) == RankGrid(2, 2, 3)
    with pytest.raises(ConfigError, match="2 tensor ranks x 2 replicas do not divide 6 ranks"):
        PipelineSettings(tensor_parallel=2, replicas=2).grid(6)
