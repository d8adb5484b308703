"""Shapes of a world: which there are, what each promises, and which comes first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ppserve.core.architecture import Architecture, Split, StageLayout, stage_layouts
from ppserve.core.partition import ExpectedWorkload
from ppserve.core.plan import StepPlan
from ppserve.planning.forecast import Intent
from ppserve.planning.shapes import (
    Conditions,
    Prospect,
    compare,
    num_gathers,
    render_prospects,
    round_seconds,
    shape_name,
    shapes,
)

GPT2 = Architecture(12, 768, 12, 1024, 50257, 50257, 3072)
LAYER_S = 1e-3


def reads(layout: StageLayout, step: StepPlan) -> float:
    """Reading the weights takes all of a step's time; the head has those of 5.45 layers."""
    return (layout.layer_weights(GPT2) + 5.45 * layout.is_last) * LAYER_S / layout.num_tensor


def computes(layout: StageLayout, step: StepPlan) -> float:
    """Computing does: each row costs the same."""
    return reads(layout, step) * step.num_tokens / 16


BUSY_READING = Conditions(reads, latency_s=0.0, return_s=0.0)
ANY = Intent(1)
BUSY_COMPUTING = replace(BUSY_READING, stage_s=computes)


def compared(world: int, callers: int, under: Conditions = BUSY_READING, intent: Intent = ANY) -> list[Prospect]:
    return compare(GPT2, replace(intent, expect=ExpectedWorkload(1, 64, callers)), world, under)


def rates(world: int, callers: int, under: Conditions = BUSY_READING) -> dict[str, float]:
    return {shape_name(each.grid): each.tokens_per_s or 0.0 for each in compared(world, callers, under)}


@pytest.mark.parametrize("world", [1, 2, 4, 6, 12])
def test_every_shape_is_there_once(world: int) -> None:
    found = [(g.tensor, g.pipeline, g.data) for g in shapes(world, GPT2)]
    sizes = range(1, world + 1)
    wanted = {(t, p, d) for t in sizes for p in sizes for d in sizes if t * p * d == world}
    assert set(found) == wanted
    assert len(found) == len(wanted)


def test_no_stage_without_a_layer_and_no_rank_without_a_head() -> None:
    small = Architecture(2, 48, 3, 64, 100, 100, 192)
    assert {shape_name(g) for g in shapes(4, small)} == {"1x1x4", "1x2x2", "2x1x2", "2x2x1"}


def test_the_round_of_a_pipeline() -> None:
    """max(P·s + h, m·s): few microbatches wait for their tokens, many for the busiest stage."""
    assert round_seconds([1.0, 1.0], 2, 0.5) == 2.5
    assert round_seconds([1.0, 1.0], 3, 0.5) == 3.0
    assert round_seconds([1.0, 3.0], 2, 0.5) == 6.0


def test_tensor_ranks_read_the_weights_once_for_all_callers() -> None:
    """Of two ranks, each reads its half once per step of all callers; two stages read theirs once for each half
    of the callers, and so do replicas with the whole."""
    alone, found = rates(1, 16)["1x1x1"], rates(2, 16)
    assert found["2x1x1"] == pytest.approx(2 * alone, rel=0.02)
    assert found["1x2x1"] == pytest.approx(0.97 * alone, rel=0.01), "of its balance"
    assert found["1x1x2"] == pytest.approx(alone, rel=0.02)


def test_where_rows_take_the_time_all_shapes_are_as_fast() -> None:
    found = rates(4, 64, BUSY_COMPUTING)
    assert found.pop("1x4x1") == pytest.approx(0.67 * found["1x1x4"], rel=0.02), "of its balance"
    assert min(found.values()) == pytest.approx(max(found.values()), rel=0.05)


def test_one_caller_has_work_for_one_replica_and_for_one_stage() -> None:
    alone, found = rates(1, 1)["1x1x1"], rates(2, 1)
    assert [found["1x1x2"], found["1x2x1"]] == pytest.approx([alone, alone])
    assert found["2x1x1"] == pytest.approx(2 * alone)


def test_gathers_that_take_long_make_stages_better() -> None:
    slow = replace(BUSY_READING, latency_s=5e-3)
    found = rates(2, 16, slow)
    assert found["2x1x1"] < found["1x2x1"]
    (whole,) = stage_layouts(Split.parse("12"))
    assert num_gathers(whole) == 0
    assert num_gathers(replace(whole, num_tensor=2)) == 1 + 12 * 4 + 1


@pytest.mark.parametrize("callers", [1, 2, 4, 64])
def test_ranks_that_share_cores_take_turns(callers: int) -> None:
    """Four ranks on one core are as fast as one, whatever they form, unless they had waited anyway."""
    own, shared = (rates(4, callers, replace(BUSY_COMPUTING, num_cores=cores)) for cores in (4.0, 1.0))
    assert all(shared[name] <= own[name] for name in own)
    assert shared["4x1x1"] == pytest.approx(own["4x1x1"] / 4)
    assert shared["1x1x4"] == pytest.approx(own["1x1x4"] / min(4, callers))
    assert shared["1x4x1"] == pytest.approx(shared["1x1x4"], rel=0.01)


def test_no_more_sequences_run_than_fit() -> None:
    """The memory of a rank holds its weights and two sequences, so that 62 of 64 callers wait."""
    intent = Intent(1, max_model_len=65, kv_cache_memory=2 * 65 * 12 * 2 * 768 * 4)
    (found,) = compared(1, 64, intent=intent)
    assert found.plan.tightest.max_tokens == 130
    assert found.tokens_per_s == pytest.approx(2 / (17.45 * LAYER_S))


def test_the_fastest_comes_first_and_what_does_not_fit_last() -> None:
    roomy = Intent(1, stage_memory=700 << 20)  # the whole model takes 622 MiB, a full sequence 72
    found = compared(2, 16, intent=replace(roomy, stage_memory=500 << 20))
    assert [shape_name(each.grid) for each in found] == ["2x1x1", "1x2x1", "1x1x2"]
    assert [each.fits for each in found] == [True, True, False]
    assert found[-1].figures["fits"] is False
    assert found[0].figures["output_tokens_per_s"] > found[1].figures["output_tokens_per_s"]
    assert all(each.fits for each in compared(2, 16, intent=roomy))
    lines = render_prospects(found).splitlines()
    assert lines[1].startswith("2x1x1")
    assert "do not fit" in lines[3]
