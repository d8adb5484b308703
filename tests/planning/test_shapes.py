"""Shapes of a world: which there are, what each promises, and which is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ppserve.core.architecture import Architecture
from ppserve.core.cost_model import Coefficients, LayerCosts
from ppserve.core.grid import RankGrid
from ppserve.errors import ConfigError
from ppserve.planning.cores import SharedCores
from ppserve.planning.forecast import Intent, forecast
from ppserve.planning.machine import Device, Wires
from ppserve.planning.scenarios import MeasuredCosts, SimulatedLoad, fixed_load
from ppserve.planning.shapes import Conditions, prospect, prospects, render_prospects, shape_name, shapes, shares
from ppserve.planning.simulator import SimulatedRequest
from tests.slow import quick_first

GPT2 = Architecture(12, 768, 12, 1024, 50257, 50257, 3072)
# Reading the weights takes nearly all of a step's time.
READS = Device(flops=1e15, memory_bandwidth=10e9, launch_s=1e-5)
FAST_WIRES = Wires(latency_s=1e-6, control_s=1e-6, return_s=1e-6, head_s=1e-6, prepare_s=1e-6, gather_s=1e-7)
# A small model's, and what is around its steps, which takes as long.
SMALL_STEPS = MeasuredCosts(LayerCosts(Coefficients(step=1e-4, row=3e-5), Coefficients(step=2e-4, sample=3e-5)))
MUCH_AROUND = Wires(head_s=2e-4, report_s=4e-4, telling_s=3e-4, prepare_s=8e-4, sending_s=2e-4)


def under(callers: int, wires: Wires = FAST_WIRES) -> Conditions:
    return Conditions(READS, wires, fixed_load(4 * callers, 16, 24, callers))


def rate(tensor: int, stages: int, replicas: int, conditions: Conditions) -> float:
    return prospect(GPT2, Intent(1), RankGrid(tensor, replicas, stages), conditions).output_tokens_per_s


@pytest.mark.parametrize("world", [1, 2, 4, 6, 12])
def test_every_shape_is_there_once(world: int) -> None:
    found = [(g.tensor, g.pipeline, g.data) for g in shapes(world, GPT2)]
    everything = range(1, world + 1)
    wanted = {(t, p, d) for t in everything for p in everything for d in everything if t * p * d == world}
    assert set(found) == wanted
    assert len(found) == len(wanted)


def test_no_stage_without_a_layer_and_no_rank_without_a_head() -> None:
    small = Architecture(2, 48, 3, 64, 100, 100, 192)
    assert {shape_name(g) for g in shapes(4, small)} == {"1x1x4", "1x2x2", "2x1x2", "2x2x1"}


def test_tensor_ranks_read_the_weights_once_for_all_callers() -> None:
    """Of two ranks, each reads its half once per step of all callers; two stages read theirs once for each half
    of the callers, and so do replicas with the whole."""
    conditions = under(16)
    alone, tensor, stages, replicas = (rate(*s, conditions) for s in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)))
    assert tensor / alone == pytest.approx(2, rel=0.05)
    assert stages / alone == pytest.approx(1, rel=0.1)
    assert replicas / alone == pytest.approx(1, rel=0.05)


def test_gathers_that_take_long_make_stages_better() -> None:
    slow = replace(FAST_WIRES, gather_s=5e-3)
    assert rate(2, 1, 1, under(16, slow)) < rate(1, 2, 1, under(16, slow))


def test_one_caller_has_work_for_one_replica() -> None:
    assert rate(1, 1, 2, under(1)) == pytest.approx(rate(1, 1, 1, under(1)), rel=1e-3)


def test_callers_that_do_not_divide_are_all_counted() -> None:
    """Three callers on two replicas are two on one and one on the other."""
    two, one = rate(1, 1, 1, under(2)), rate(1, 1, 1, under(1))
    assert one < 0.9 * two
    assert rate(1, 1, 2, under(3)) == pytest.approx(two + one, rel=0.02)


def test_more_callers_than_requests() -> None:
    for requests, callers in ((1, 32), (2, 16)):
        conditions = replace(under(1), load=fixed_load(requests, 16, 24, callers))
        for replicas in (2, 4):
            found = prospect(GPT2, Intent(1), RankGrid(1, replicas, 1), conditions)
            assert sum(len(each.duration_s) for each in found.outcomes) == requests


@pytest.mark.parametrize("callers", [None, 1, 2, 5])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_every_request_is_asked_of_one_replica(callers: int | None, replicas: int) -> None:
    requests = tuple(SimulatedRequest(float(at_s), 16, 24) for at_s in range(7))
    divided = shares(SimulatedLoad(requests, callers), replicas)
    assert sorted(each.arrival_s for load in divided for each in load.requests) == list(range(7))
    sizes = [len(load.requests) for load in divided]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(load.concurrency or 0 for load in divided) == (callers or 0)


def test_the_requests_of_all_replicas_are_counted() -> None:
    assert prospect(GPT2, Intent(1), RankGrid(1, 2, 1), under(2)).figures["requests"] == 8


def test_the_head_works_for_the_result_of_each_rank() -> None:
    callers = under(16)
    heavy = Conditions(Device(1e15, 1e15, 1e-6), replace(callers.wires, report_s=0.05), callers.load)
    one = rate(1, 1, 1, heavy)
    assert one == pytest.approx(2 * rate(2, 1, 1, heavy), rel=0.1)
    assert one > 4 * rate(1, 2, 1, heavy), "two steps of half the sequences, or three of a third, and two for each"


def test_the_best_comes_first_and_what_does_not_fit_last() -> None:
    roomy = Intent(1, stage_memory=700 << 20)  # the whole model takes 475 MiB, a full sequence 72
    found = prospects(GPT2, replace(roomy, stage_memory=500 << 20), 2, under(16))
    assert [shape_name(each.grid) for each in found] == ["2x1x1", "1x2x1", "1x1x2"]
    assert [each.fits for each in found] == [True, True, False]
    assert found[-1].figures == {"tensor": 1, "stages": 1, "replicas": 2, "fits": False}
    assert all(each.fits for each in prospects(GPT2, roomy, 2, under(16)))
    lines = render_prospects(found).splitlines()
    assert lines[1].startswith("2x1x1")
    assert "does not fit" in lines[3]


def test_nothing_fits() -> None:
    with pytest.raises(ConfigError, match="no shape of 2 ranks holds this model"):
        prospects(GPT2, Intent(1, stage_memory=1 << 20), 2, under(1))


def test_among_shapes_as_fast_the_shorter_time_between_tokens_decides() -> None:
    """Four ranks, one caller: stages add no speed, tensor ranks do."""
    found = prospects(GPT2, Intent(1), 4, under(1))
    assert shape_name(found[0].grid) == "4x1x1"
    rates = [each.output_tokens_per_s for each in found]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("tensor", [2, 3, 4])
def test_tensor_ranks_share_the_weights(tensor: int) -> None:
    """Each has its part of both copies of the embedding and of all matrices; norms are everybody's."""
    whole = forecast(GPT2, Intent(1)).stages[0].weight_bytes
    stage = forecast(GPT2, Intent(1, num_tensor=tensor, kv_cache_memory=1 << 40)).stages[0]
    assert stage.weight_bytes == pytest.approx(whole / tensor, rel=0.02)
    assert stage.kv_memory == Intent(1).stage_memory - stage.weight_bytes, "no more than there is"


def test_the_heads_work_for_each_token_limits_what_all_replicas_give() -> None:
    """A millisecond for each token: at most 1,000 a second, however many replicas there are."""
    busy = under(16, replace(FAST_WIRES, token_s=1e-3))
    fast = Conditions(Device(1e15, 1e13, 1e-6), busy.wires, busy.load)
    for replicas in (1, 2):
        assert rate(1, 1, replicas, fast) == pytest.approx(1000, rel=0.1)


@pytest.mark.parametrize("shape", quick_first([(1, 1, 4), (1, 2, 2), (1, 4, 1), (4, 1, 1), (2, 2, 1)], 2))
def test_cores_compute_no_more_than_their_work_for_a_token_allows(shape: tuple[int, int, int]) -> None:
    """Four ranks that compute all the time: on two cores each has half of one, on four its own. Where one waits
    for another some of that is lost, but not much."""
    callers = under(64)
    ranks = (0, 1, 2, 3)
    found = {}
    for cores in (1, 2, 4):
        conditions = replace(callers, hosts=(SharedCores(cores, ranks),))
        found[cores] = prospect(GPT2, Intent(1), RankGrid(shape[0], shape[2], shape[1]), conditions)
    own = prospect(GPT2, Intent(1), RankGrid(shape[0], shape[2], shape[1]), callers)
    busy = sum(stage["busy"] for stage in own.figures["stages"]) * shape[0] * shape[2]
    for cores, each in found.items():
        expected = own.output_tokens_per_s * min(1.0, cores / busy)
        assert 0.8 * expected < each.output_tokens_per_s < 1.02 * expected


@pytest.mark.parametrize("replicas", [2, 3, 4, 5])
def test_replicas_on_shared_cores_end_together(replicas: int) -> None:
    """So that the sum of their rates is what all of them give until the last has ended."""
    host = SharedCores(2, tuple(range(replicas)), caller_s=2e-4)
    load = fixed_load(12 * 20, 16, 32, 60)
    under = Conditions(SMALL_STEPS, MUCH_AROUND, load, hosts=(host,))
    found = prospect(GPT2, Intent(1), RankGrid(1, replicas, 1), under)
    longest_s = max(outcome.wall_s for outcome in found.outcomes)
    tokens = sum(outcome.new_tokens for outcome in found.outcomes)
    assert found.output_tokens_per_s == pytest.approx(tokens / longest_s, rel=0.05)


def test_tensor_ranks_that_share_cores_spin_for_each_other() -> None:
    """On one core, each of 50 gathers of a step costs one of two ranks 10 ms more: half a second for 64 tokens."""
    on_one = replace(under(64), hosts=(SharedCores(1, (0, 1)),))
    spinning = replace(on_one, wires=replace(FAST_WIRES, spin_s=10e-3))
    tensor = 1 / rate(2, 1, 1, spinning) - 1 / rate(2, 1, 1, on_one)
    assert tensor == pytest.approx(0.5 / 64, rel=0.2)
    assert rate(1, 2, 1, spinning) == rate(1, 2, 1, on_one)


def test_ranks_share_what_callers_leave_of_the_cores() -> None:
    """A tenth of two cores is taken from two replicas. Of two tensor ranks, one waits for the other that has lost
    its core, so that a fifth is lost."""
    for shape, longer in (((1, 1, 2), 1.1), ((2, 1, 1), 1.2)):
        alone = rate(*shape, under(64))
        host = SharedCores(2, (0, 1), caller_s=0.2 / alone)
        slowed = rate(*shape, replace(under(64), hosts=(host,)))
        assert alone / slowed == pytest.approx(longer, rel=0.03)


def test_cores_of_another_host_are_not_taken_by_callers() -> None:
    callers_s = {"caller_s": 1e-4}
    apart = replace(under(64), hosts=(SharedCores(2, (0,), **callers_s), SharedCores(1, (1,))))
    assert rate(1, 1, 2, apart) == pytest.approx(rate(1, 1, 2, under(64)), rel=1e-3)
    together = replace(under(64), hosts=(SharedCores(2, (0, 1), **callers_s),))
    assert rate(1, 1, 2, together) < 0.97 * rate(1, 1, 2, apart)


@pytest.mark.parametrize(
    "shape", quick_first([(2, 2, 1), (1, 1, 4), (1, 2, 2), (1, 4, 1), (4, 1, 1), (2, 1, 2)], 2)
)
def test_cores_that_are_to_spare_change_nothing(shape: tuple[int, int, int]) -> None:
    """Five for four ranks and the head, which compute around a step as much as in it: often the head has the next
    thing to do before it has done the last."""
    own = Conditions(SMALL_STEPS, MUCH_AROUND, fixed_load(48, 64, 24, 16))
    spare = replace(own, hosts=(SharedCores(5, (0, 1, 2, 3)),))
    assert rate(*shape, spare) == pytest.approx(rate(*shape, own), rel=1e-3)


def test_only_computing_takes_a_core_for_each_thread() -> None:
    """A rank of three threads on three cores: what it does around a step is done by one of them, so that the head
    has the others meanwhile."""
    wires = replace(FAST_WIRES, prepare_s=0.05, telling_s=1e-3)
    own = replace(under(16), wires=wires)
    shared = replace(own, hosts=(SharedCores(3, (0,), threads=3),))
    assert rate(1, 1, 1, shared) == pytest.approx(rate(1, 1, 1, own), rel=1e-3)


def test_callers_and_the_head_take_more_than_the_core_that_a_lone_rank_leaves() -> None:
    """Of two; on three the callers have one of their own, since they compute while the head still tells others."""
    sampling_state = replace(under(16), wires=replace(FAST_WIRES, telling_s=1e-3))

    def on(cores: int, caller_s: float) -> float:
        return rate(1, 1, 1, replace(sampling_state, hosts=(SharedCores(cores, (0,), caller_s=caller_s),)))

    assert on(2, 0.0) == pytest.approx(on(3, 0.0), rel=1e-3)
    assert on(2, 1e-3) == pytest.approx(on(3, 0.0), rel=1e-3), "it is enough"
    assert on(3, 3e-3) == pytest.approx(on(3, 0.0), rel=1e-3)
    assert on(2, 3e-3) < 0.95 * on(3, 3e-3)
