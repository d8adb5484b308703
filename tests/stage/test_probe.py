"""Costs of the model's parts: sensible, measured once, remembered, and never in the way of a start."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ppserve.config import PipelineSettings, ServeConfig
from ppserve.core.architecture import Split
from ppserve.core.partition import PartCosts, expected_step
from ppserve.model.checkpoint import WHOLE, TensorPart
from ppserve.model.checkpoint.opening import open_checkpoint
from ppserve.model.checkpoint.tensors import FileCheckpoint
from ppserve.model.cuda.backend import DeviceOptions
from ppserve.stage.device import DeviceSetup
from ppserve.stage.probe import measure_costs, part_costs, with_tilde

pytestmark = pytest.mark.slow

COMPUTE = DeviceSetup(torch.device("cpu"), "float32", 1)
TINY = open_checkpoint("tiny")
STEP = expected_step(128)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ppserve"


def test_every_part_costs_something_and_is_remembered(cache: Path) -> None:
    costs = part_costs(TINY, COMPUTE, STEP)
    assert min(costs.attention, costs.mlp, costs.overhead, costs.head) > 0
    # Another measurement would never give the same seconds to the last bit.
    assert part_costs(TINY, COMPUTE, STEP) == costs
    assert len(list(cache.glob("costs-*.json"))) == 1


def test_what_computes_otherwise_is_measured_anew(cache: Path) -> None:
    """The GPU's operators in place of the CPU's, products with fixed tiles, more ranks, another step."""
    reference = replace(COMPUTE, reference=True)
    invariant = replace(reference, options=DeviceOptions(batch_invariant=True))
    for number, compute in enumerate((COMPUTE, reference, invariant, replace(COMPUTE, stages_here=4)), 1):
        part_costs(TINY, compute, STEP)
        assert len(list(cache.glob("costs-*.json"))) == number
    part_costs(TINY, COMPUTE, expected_step(1024))
    part_costs(TINY, COMPUTE, STEP, num_tensor=2)
    assert len(list(cache.glob("costs-*.json"))) == 6


def test_a_damaged_memory_and_one_that_cannot_be_written_are_done_without(cache: Path) -> None:
    part_costs(TINY, COMPUTE, STEP)
    (remembered,) = cache.glob("costs-*.json")
    for damage in ("", "[1, 2]", '{"attention": 1}'):
        remembered.write_text(damage)
        assert isinstance(part_costs(TINY, COMPUTE, STEP), PartCosts)
    shutil.rmtree(cache)
    cache.write_text("a file where the directory should be")
    assert isinstance(part_costs(TINY, COMPUTE, STEP), PartCosts)


def test_only_what_decides_something_is_measured(cache: Path) -> None:
    def measured(pipeline: PipelineSettings, world_size: int) -> PartCosts | None:
        config = ServeConfig(pipeline=pipeline)
        return measure_costs(config, pipeline.grid(world_size), 0, TINY, COMPUTE)

    assert measured(PipelineSettings(), 2) is not None
    assert measured(PipelineSettings(tensor_parallel=2), 4) is not None
    assert measured(PipelineSettings(layers=Split.parse("5,3")), 2) is None
    assert measured(PipelineSettings(), 1) is None
    assert measured(PipelineSettings(), 9) is None, "the head says that these are too many"
    assert len(list(cache.glob("costs-*.json"))) == 2, "of a half of the heads other costs than of all"


class Recording(FileCheckpoint):
    """A checkpoint that remembers how many numbers of each tensor were read."""

    read: Counter[str]

    def __init__(self, of: FileCheckpoint) -> None:
        vars(self).update(vars(of), read=Counter())

    def tensor(self, name: str, part: TensorPart = WHOLE) -> torch.Tensor:
        found = super().tensor(name, part)
        self.read[name] += found.numel()
        return found


def test_a_measurement_reads_the_embedding_once_which_may_be_gigabytes(cache: Path) -> None:
    part_costs(recording := Recording(TINY), COMPUTE, STEP)
    assert recording.read["wte.weight"] == TINY.architecture.padded_vocab_size * TINY.architecture.width


def test_the_place_of_the_kernels_is_one_line_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert with_tilde(Path("/home/someone/.cache/ppserve")) == "~/.cache/ppserve"
    for name in (os.fsdecode(b"/home/someone/\xff"), "/var/a\nready"):
        assert "\n" not in with_tilde(Path(name)).encode().decode()
