"""A stage that lacks what it needs: weights that can be read, memory, or a device that still works."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ppserve import wire
from ppserve.core.architecture import StageLayout
from ppserve.errors import CheckpointError
from ppserve.model.backend import AnyBackend, Computing, StageModel
from ppserve.model.checkpoint import WHOLE, TensorPart
from ppserve.model.cuda.backend import CudaBackend, DeviceOptions
from ppserve.model.cuda.cache import DeviceCache, DeviceInputs
from ppserve.stage.connecting import ThreadConnector
from ppserve.stage.device import DeviceSetup
from tests.model.random_checkpoint import RandomCheckpoint, architecture
from tests.stage.one_stage import NUM_BLOCKS, WITHIN_S, ByHand, OneStage, Poisoned, plan, stages, start

pytestmark = pytest.mark.timeout(120)


class Damaged(RandomCheckpoint):
    """The last norm's file is cut off."""

    def tensor(self, name: str, part: TensorPart = WHOLE) -> torch.Tensor:
        if name.startswith("ln_f"):
            raise CheckpointError(self.path, f"{name}: truncated")
        return super().tensor(name, part)


def test_a_stage_that_cannot_read_weights_waits_for_other_layers() -> None:
    """The weights of the first stage are good."""
    with ThreadPoolExecutor(1) as threads:
        stage = start(threads, 0, 2, ByHand(), Damaged(architecture()))
        stage.hear(wire.Hello)
        for epoch in (1, 2):
            stage.tell(wire.Assign(StageLayout(1, 2, 2, 2)))
            assert "stage 1: random: ln_f.weight: truncated" in stage.hear(wire.Unable).reason
            assert stage.load(StageLayout(0, 2, 0, 2)).params > 0
            stage.enter(epoch)
            stage.tell(wire.Abandon(epoch))
            stage.hear(wire.Broken)
        stage.tell(wire.Shutdown(76))
        assert stage.exit_code.result(WITHIN_S) == 76


class FailingGpu(CudaBackend):
    """A GPU on which the self-test, the cache or recording fails. at: which of them."""

    at, error = "", Exception()

    def make_cache(self, arch: Any, layout: Any, num_blocks: int, *rest: Any, **options: Any) -> DeviceCache:
        if self.at == ("cache" if num_blocks == NUM_BLOCKS else "self-test"):
            raise self.error
        return super().make_cache(arch, layout, num_blocks, *rest, **options)

    def recorded(self, model: StageModel[DeviceInputs], cache: DeviceCache) -> Computing[DeviceInputs]:
        if self.at == "recording":
            raise self.error
        return super().recorded(model, cache)


class OnFailingGpu(DeviceSetup):
    untestable_reason = "of another kind"

    def backend(self) -> AnyBackend:
        return FailingGpu(self.device, self.dtype, DeviceOptions(True, max_rows=2, max_step_rows=2))


# What torch's allocator says; and what others who take memory say: graphs, cuBLAS, Triton's launcher.
FULL = [
    torch.OutOfMemoryError("CUDA out of memory"),
    torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
]


REMEDIES = ["--kv-cache-memory", "--max-num-seqs", "--cuda-graphs off"]


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, at: str, error: Exception) -> Iterator[OneStage]:
    """A stage that has said Hello."""
    monkeypatch.setattr(FailingGpu, "at", at)
    monkeypatch.setattr(FailingGpu, "error", error)
    compute = OnFailingGpu(torch.device("cpu"), "float32", 1)
    with ThreadPoolExecutor(1) as threads:
        stage = start(threads, 0, 1, ThreadConnector(), RandomCheckpoint(architecture()), compute)
        try:
            stage.hear(wire.Hello)
            yield stage
        finally:
            stage.tell(wire.Shutdown())


@pytest.mark.parametrize("error", [*FULL, MemoryError("the system has no 5 MB")], ids=str)
@pytest.mark.parametrize("at", ["cache", "recording"])
def test_memory_that_is_not_enough_for_an_epoch_is_told_with_what_helps(
    at: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told in each epoch. The weights stay, and the next epoch may have room."""
    with failing(monkeypatch, at, error) as stage:
        assert stage.load(StageLayout(0, 1, 0, 4)).nondeterministic_reason == "of another kind", (
            "the self-test has passed"
        )
        for epoch in (1, 3):
            stage.form(epoch)
            reason = stage.hear(wire.Unable).reason
            assert reason.startswith(f"rank 0: {error}")
            assert all((remedy in reason) == (error in FULL) for remedy in REMEDIES)
            stage.tell(wire.Abandon(epoch))  # it has left, and says nothing more
            monkeypatch.setattr(FailingGpu, "at", "")
            stage.enter(epoch + 1)
            stage.tell(wire.Abandon(epoch + 1))
            stage.hear(wire.Broken)
            monkeypatch.setattr(FailingGpu, "at", at)
            stage.load(StageLayout(0, 1, 0, 4))


def test_an_epoch_that_lacks_memory_on_a_lost_device_ends_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: only a new process may have the device again."""
    with failing(monkeypatch, "cache", FULL[0]) as stage:
        stage.load(StageLayout(0, 1, 0, 4))
        monkeypatch.setattr(OnFailingGpu, "raise_if_lost", Poisoned.raise_if_lost)
        stage.form(1)
        with pytest.raises(torch.AcceleratorError):
            stage.exit_code.result(WITHIN_S)


class OutOfResources(Exception):
    """What Triton raises where a kernel cannot be made."""


@pytest.mark.parametrize("error", [*FULL, OutOfResources("out of resource: shared memory")], ids=str)
def test_a_self_test_that_cannot_run_is_told_with_what_helps(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    with failing(monkeypatch, "self-test", error) as stage:
        unable = stage.assign(StageLayout(0, 1, 0, 4))
        assert isinstance(unable, wire.Unable)
        reason = unable.reason
        assert reason.startswith("stage 0: it cannot compute on cpu (")
        assert f": {type(error).__name__}: {error}" in reason
        assert all((remedy in reason) == (error in FULL) for remedy in REMEDIES)


def test_a_device_that_is_lost_while_loading_ends_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: only a new process may have the device again."""
    lost = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(OnFailingGpu, "raise_if_lost", Poisoned.raise_if_lost)
    with failing(monkeypatch, "self-test", lost) as stage:
        stage.tell(wire.Assign(StageLayout(0, 1, 0, 4)))
        with pytest.raises(torch.AcceleratorError):
            stage.exit_code.result(WITHIN_S)


@pytest.mark.parametrize("error", FULL, ids=str)
def test_memory_that_is_not_enough_for_a_step_says_what_helps(error: Exception) -> None:
    connector = ByHand()
    with stages("1,1", connector, only=1) as [stage]:
        stage.enter(1)
        connector.opened[0].fails_at, connector.opened[0].error = "expect 0", error
        stage.tell(wire.Plan(plan(1, 0)))
        reason = stage.hear(wire.Broken).reason
    assert reason.startswith(f"{type(error).__name__}: {error}; ")
    assert all(remedy in reason for remedy in REMEDIES)
