"""A stage's life, message by message: what it answers, what it drops, what it keeps."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from ppserve import wire
from ppserve.core.architecture import StageLayout
from ppserve.core.plan import Draw, StepMasks, StepPlan
from ppserve.core.request import SamplingParams
from ppserve.core.scheduling.token_filter import packed_mask
from ppserve.errors import TransportError
from ppserve.model.backend import AnyBackend, CachedModel
from ppserve.model.cpu.backend import CpuBackend
from ppserve.stage.connecting import ThreadConnector
from ppserve.stage.device import DeviceSetup
from tests.model.pipelines import Pipeline
from tests.model.random_checkpoint import RandomCheckpoint, architecture
from tests.stage.one_stage import WITHIN_S, ByHand, OneStage, plan, stages, start

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def connector() -> ByHand:
    return ByHand()


@pytest.fixture
def last(connector: ByHand) -> Iterator[OneStage]:
    """The second of two stages, in epoch 1."""
    with stages("1,1", connector, only=1) as [stage]:
        stage.enter(1)
        yield stage


def serve(stage: OneStage, transport_of: ByHand, epoch: int, step_id: int) -> wire.Result:
    """A step of the last stage whose hidden states arrive."""
    stage.tell(wire.Plan(plan(epoch, step_id)))
    transport_of.opened[-1].arrived.release()
    return stage.hear(wire.Result)


@pytest.mark.parametrize("split", ["3", "2,1", "1.5,1.5", "1,1,1"])
def test_threads_draw_what_the_model_draws(split: str) -> None:
    checkpoint = RandomCheckpoint(architecture(num_layers=3))
    expected = [drawn.token_id for drawn in Pipeline(checkpoint, "3", num_sequences=1).generate((1, 2, 3), 6)]
    with stages(split, ThreadConnector(), checkpoint) as pipeline:
        for stage in pipeline:
            stage.form(1)
        for stage in pipeline:
            stage.hear(wire.Ready)
        token_ids, drawn, position = (1, 2, 3), [], 0
        for step_id in range(6):
            for stage in pipeline:
                stage.tell(wire.Plan(plan(1, step_id, token_ids, position)))
            results = [stage.hear(wire.Result).result for stage in pipeline]
            assert [result.place for result in results] == list(range(len(pipeline)))
            position += len(token_ids)
            token_ids = (results[-1].drawn[0].token_id,)
            drawn.append(token_ids[0])
        assert drawn == expected
        assert all(stage.told == ["ready", "served"] for stage in pipeline), "each once: after the first step"


class Scales(DeviceSetup):
    """weighed: the weights, the vocabulary and the bytes of a sequence that it was asked about."""

    weighed: list[tuple[int, int, int]]

    def kv_budget_bytes(self, weight_bytes: int, vocab_size: int, sequence_bytes: int) -> int:
        self.weighed.append((weight_bytes, vocab_size, sequence_bytes))
        return 1 << 20


def test_a_stage_says_what_it_found_what_it_holds_and_what_it_weighs() -> None:
    checkpoint, compute = RandomCheckpoint(architecture()), Scales(torch.device("cpu"), "float32", 1)
    Scales.weighed = []
    with ThreadPoolExecutor(1) as threads:
        stage = start(threads, 0, 1, ThreadConnector(), checkpoint, compute)
        hello = stage.hear(wire.Hello)
        assert (hello.rank, hello.world_size) == (0, 1)
        assert (hello.model.architecture, hello.model.dtype) == (checkpoint.architecture, "float32")
        assert hello.device.gpu is None
        loaded = stage.load(StageLayout(0, 1, 0, 4))
        arch = checkpoint.architecture
        assert loaded.params == arch.num_params + arch.vocab_size * arch.width
        assert loaded.nondeterministic_reason is None
        sequence_bytes = arch.max_positions // 16 * loaded.block_bytes
        assert compute.weighed == [(loaded.weight_bytes, arch.vocab_size, sequence_bytes)]
        stage.tell(wire.Shutdown(7))
        assert stage.exit_code.result(WITHIN_S) == 7


def test_a_plan_of_an_epoch_that_is_over_is_dropped(last: OneStage, connector: ByHand) -> None:
    last.enter(2)
    last.tell(wire.Plan(plan(1, 5)))
    assert serve(last, connector, epoch=2, step_id=0).result.epoch == 2
    assert connector.opened[-1].log == ["warm up", "expect 0", "receive 0"]


def test_plans_that_are_known_are_expected_before_they_are_computed(last: OneStage, connector: ByHand) -> None:
    transport = connector.opened[0]
    last.tell(wire.Plan(plan(1, 0)))
    assert transport.waiting.wait(WITHIN_S)
    for step_id in (1, 2):
        last.tell(wire.Plan(plan(1, step_id)))
    for step_id in range(3):
        transport.arrived.release()
        assert last.hear(wire.Result).result.step_id == step_id
    order = ["warm up", "expect 0", "receive 0", "expect 1", "expect 2", "receive 1", "receive 2"]
    assert transport.log == order


@pytest.fixture
def lone(connector: ByHand) -> Iterator[OneStage]:
    """The only stage, in epoch 1."""
    with stages("2", connector) as [stage]:
        stage.enter(1)
        yield stage


def test_a_step_that_was_sent_ahead_takes_the_token_that_the_step_before_drew(lone: OneStage) -> None:
    """A cancelled one is reported, but not computed."""
    hot = Draw(SamplingParams(temperature=2.0, seed=5))

    def tell(step_id: int, token_ids: tuple[int, ...], start: int) -> None:
        is_ahead = not token_ids
        lone.tell(wire.Plan(replace(with_draw(plan(1, step_id, token_ids, start), hot), is_ahead=is_ahead)))

    def drawn() -> int | None:
        (one,) = lone.hear(wire.Result).result.drawn
        return one.token_id

    right: list[int] = []
    for step_id, first in enumerate((0, 3, 4)):
        tell(step_id, (right[-1],) if right else (1, 2, 3), first)
        right.append(drawn() or 0)
    tell(3, (right[0],), 4)
    assert drawn() != right[2], "it depends on the token before"
    tell(4, (1, 2, 3), 0)
    for step_id, first in ((5, 3), (6, 4)):
        tell(step_id, (), first)
    assert [drawn() for _ in range(3)] == right
    lone.tell(wire.Cancel((7,)))
    tell(7, (), 5)
    result = lone.hear(wire.Result).result
    assert (result.step_id, result.drawn, result.computed_ns) == (7, (), 0)


def ahead_of_masks(lone: OneStage, step_id: int) -> None:
    """Send a step whose mask is not known yet, after a prompt of three tokens."""
    lone.tell(wire.Plan(plan(1, step_id - 1, (1, 2, 3), 0)))
    masked = with_draw(plan(1, step_id, (), 3), Draw(SamplingParams(seed=5)))
    lone.tell(wire.Plan(replace(masked, is_ahead=True, awaits_masks=True)))
    assert lone.hear(wire.Result).result.step_id == step_id - 1


def test_a_step_waits_for_the_masks_that_it_was_sent_without(lone: OneStage) -> None:
    allowed = (5, 11, 23)
    for step_id, token_id in enumerate(allowed, 1):
        ahead_of_masks(lone, 10 * step_id)
        for wrong in (StepMasks(1, 7, (None,)), StepMasks(0, 10 * step_id, (None,))):
            lone.tell(wire.Masks(wrong))
        lone.tell(wire.Masks(StepMasks(1, 10 * step_id, (packed_mask([token_id], 64),))))
        result = lone.hear(wire.Result).result
        assert [one.token_id for one in result.drawn] == [token_id]
        assert result.computed_ns + result.gathered_ns == result.stamps.ended - result.stamps.begun


def test_a_cancelled_step_does_not_wait_for_its_masks(lone: OneStage) -> None:
    ahead_of_masks(lone, 1)
    lone.tell(wire.Cancel((1,)))
    assert lone.hear(wire.Result).result.step_id == 1


def test_a_step_that_waits_for_its_masks_ends_with_its_epoch_and_with_the_head(
    lone: OneStage, caplog: pytest.LogCaptureFixture
) -> None:
    """Which the head has wanted: nothing is wrong with the rank."""
    ahead_of_masks(lone, 1)
    lone.tell(wire.Abandon(1))
    assert lone.hear(wire.Broken).epoch == 1
    lone.enter(2)
    lone.tell(wire.Plan(replace(plan(2, 2, (1, 2, 3), 0))))
    lone.hear(wire.Result)
    masked = with_draw(plan(2, 3, (), 3), Draw(SamplingParams()))
    lone.tell(wire.Plan(replace(masked, is_ahead=True, awaits_masks=True)))
    lone.tell(wire.Shutdown())
    assert lone.hear(wire.Broken).epoch == 2
    assert lone.exit_code.result(WITHIN_S) == 0
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


def with_draw(sent: StepPlan, draw: Draw) -> StepPlan:
    return replace(sent, slices=tuple(replace(slice_, draw=draw) for slice_ in sent.slices))


@pytest.mark.parametrize("split", ["1,1", "1,1,1"])
def test_buffers_hold_as_many_frames_as_steps_may_be_in_flight(split: str, connector: ByHand) -> None:
    """P + 1: with fewer, a stage would wait to hand one on."""
    with stages(split, connector, RandomCheckpoint(architecture(num_layers=3)), only=1) as [stage]:
        stage.enter(1)
        assert connector.opened[0].frames.depth == len(split.split(",")) + 1


@pytest.mark.parametrize(("only", "waits"), [(0, ["send 0"]), (1, ["expect 0", "receive 0"])])
def test_abandon_ends_the_wait_for_a_neighbour(only: int, waits: list[str], connector: ByHand) -> None:
    with stages("1,1", connector, only=only) as [stage]:
        stage.enter(1)
        stage.tell(wire.Plan(plan(1, 0)))
        assert connector.opened[0].waiting.wait(WITHIN_S)
        assert connector.opened[0].log == ["warm up", *waits]
        stage.tell(wire.Abandon(1))
        assert stage.hear(wire.Broken).epoch == 1
        assert connector.opened[0].closed
        stage.enter(2)  # the weights are there: nothing is loaded again


def test_abandon_between_steps(last: OneStage, connector: ByHand) -> None:
    last.tell(wire.Abandon(1))
    assert last.hear(wire.Broken).reason == "given up by the head"
    last.tell(wire.Abandon(1))  # said again: it has left, and says nothing more
    last.enter(2)


def test_a_neighbour_that_is_gone_breaks_the_epoch_once(
    last: OneStage, connector: ByHand, caplog: pytest.LogCaptureFixture
) -> None:
    """Reported before it is left: the head ends the neighbours' waits, while a group takes its time to end."""
    for step_id in (0, 1):
        last.tell(wire.Plan(plan(1, step_id)))
    transport = connector.opened[0]
    transport.may_close.clear()
    transport.breaks = True
    transport.arrived.release()
    broken = last.hear(wire.Broken)
    assert (broken.epoch, broken.reason) == (1, "TransportError: obedient: broken")
    assert caplog.messages == ["epoch 1: step 0 failed: obedient: broken"]
    assert not transport.closed
    transport.may_close.set()
    last.tell(wire.Abandon(1))
    last.enter(2)
    assert transport.closed
    assert "served" not in last.told, "no step was yet"
    assert serve(last, connector, epoch=2, step_id=2).result.step_id == 2


class CountingBackend(CpuBackend):
    """made: the numbers of blocks of the caches of epochs. latest: what computes with the last of them."""

    made: list[int]
    latest: weakref.ref[Any]

    def with_cache(self, model: Any, num_blocks: int, *rest: Any, **options: Any) -> CachedModel:
        assert not self.made or self.latest() is None, "there may be no memory for two caches"
        CountingBackend.made = [*self.made, num_blocks]
        cached = super().with_cache(model, num_blocks, *rest, **options)
        CountingBackend.latest = weakref.ref(cached.prepare)
        return cached


class Counts(DeviceSetup):
    def backend(self) -> AnyBackend:
        return CountingBackend("float32", 1)


def test_a_cache_is_kept_while_epochs_have_as_many_blocks_and_else_made_anew(connector: ByHand) -> None:
    """It is so where the stage's own layers stay, too: others may hold more or less, so a block table may name
    other blocks."""
    CountingBackend.made = []
    with ThreadPoolExecutor(1) as threads:
        compute = Counts(torch.device("cpu"), "float32", 1)
        stage = start(threads, 0, 1, connector, RandomCheckpoint(architecture()), compute)
        stage.hear(wire.Hello)
        stage.load(StageLayout(0, 1, 0, 4))
        drawn = []
        for epoch, num_blocks in enumerate((8, 8, 12, 4, 4), 1):
            stage.enter(epoch, num_blocks)
            last = replace(plan(epoch, epoch).slices[0], block_table=(num_blocks - 1,))
            stage.tell(wire.Plan(replace(plan(epoch, epoch), slices=(last,))))
            drawn += stage.hear(wire.Result).result.drawn
        stage.tell(wire.Shutdown())
    assert CountingBackend.made == [8, 12, 4]
    assert len({one.token_id for one in drawn}) == 1, "in whichever block its keys are"


def test_an_epoch_that_is_lost_while_it_forms(connector: ByHand) -> None:
    with stages("1,1", connector, only=1) as [stage]:
        connector.on_open = lambda form: stage.tell(wire.Abandon(1))
        stage.form(1)
        assert stage.hear(wire.Broken).reason == "TransportError: the epoch was lost while it formed"
        assert connector.opened[0].log == [], "it has not waited for a neighbour"
        stage.enter(2)


def test_an_epoch_that_cannot_form_is_left(connector: ByHand) -> None:
    def fail_at_first(form: wire.Form) -> None:
        if form.epoch == 1:
            raise TransportError("no store")

    connector.on_open = fail_at_first
    with stages("1,1", connector, only=1) as [stage]:
        left_before = connector.left
        stage.form(1)
        assert stage.hear(wire.Broken).reason == "TransportError: no store"
        assert connector.left > left_before
        stage.enter(2)


@pytest.mark.parametrize("is_kept", [False, pytest.param(True, id="the test can fail")])
def test_nothing_keeps_the_wires_of_an_epoch_that_broke(is_kept: bool, last: OneStage, connector: ByHand) -> None:
    """Kept connections would leave a neighbour waiting. Python 3.12.1's `contextmanager` makes such cycles."""
    if is_kept:
        cycle: list[object] = [connector.opened[0]]
        cycle.append(cycle)
        del cycle
    last.tell(wire.Plan(plan(1, 0)))
    connections = weakref.ref(connector.opened[0])
    connector.opened[0].breaks = True
    gc.disable()
    try:
        connector.opened.pop().arrived.release()
        last.hear(wire.Broken)
        last.enter(2)
        assert (connections() is not None) == is_kept
    finally:
        gc.enable()


def test_shutdown_leaves_the_epoch(last: OneStage, connector: ByHand) -> None:
    last.tell(wire.Shutdown(3))
    assert last.exit_code.result(WITHIN_S) == 3
    assert connector.opened[0].ends == ["interrupt", "close"]
