"""Which device a stage gets, and how much of its memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ppserve import Pipeline
from ppserve.config import DeviceSettings, ServeConfig
from ppserve.errors import ConfigError
from ppserve.stage.device import Compute, devices_here, gpu_share

GIB = 1 << 30
CPU = torch.device("cpu")


def asking(*devices: str) -> ServeConfig:
    return replace(ServeConfig(), device=DeviceSettings(devices=devices or None))


def test_stages_that_share_a_gpu_share_its_memory() -> None:
    """Whoever asks first does not take what the other will need for its weights."""
    alone = gpu_share(70 * GIB, 80 * GIB, 10 * GIB, stages=1)
    first = gpu_share(70 * GIB, 80 * GIB, 10 * GIB, stages=2)
    second = gpu_share(60 * GIB - first, 80 * GIB, 10 * GIB, stages=2)
    assert alone == int(70 * GIB * 0.85)
    assert first == int(30 * GIB * 0.85)
    assert first + second + 20 * GIB <= 80 * GIB
    assert second == int(30 * GIB * 0.85)


def test_no_more_than_is_free_and_never_less_than_nothing() -> None:
    assert gpu_share(1 * GIB, 80 * GIB, 0, stages=1) == int(0.85 * GIB)
    assert gpu_share(40 * GIB, 80 * GIB, 50 * GIB, stages=2) == 0


def test_devices_are_those_that_were_asked_for() -> None:
    assert devices_here(asking("cpu", "cpu:0"), 2) == (CPU, CPU)
    with pytest.raises(ConfigError, match="1 devices for 2 stages"):
        devices_here(asking("cpu"), 2)
    with pytest.raises(ConfigError, match="'gpu' is not a device such as"):
        devices_here(asking("gpu"), 1)
    absent = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(ConfigError, match=f"'{absent}' is not here"):
        devices_here(asking(absent), 1)


def test_a_pipeline_has_a_stage_for_each_device() -> None:
    with Pipeline("tiny", devices=["cpu", "cpu"], dtype="float32", threads=1) as pipeline:
        assert len(pipeline.topology().stages) == 2
        assert pipeline.complete("Once upon a time", max_tokens=3, temperature=0).text
    with pytest.raises(ConfigError, match="2 devices for 3 stages"):
        Pipeline("tiny", 3, devices=["cpu", "cpu"])


@pytest.mark.parametrize(("reference", "expected"), [(False, 1), (True, 2)])
def test_torch_has_threads_only_where_it_computes(reference: bool, expected: int) -> None:
    """Beside our kernels its threads would spin after each of its operators, on the same cores."""
    num_threads = torch.get_num_threads()
    try:
        Compute(torch.device("cpu"), "float32", False, 1, threads=2, reference=reference).occupy()
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(num_threads)
