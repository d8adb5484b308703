"""Which shape is chosen for ranks, by what they say of themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as changed

from ppserve import wire
from ppserve.config import CacheSettings, PipelineSettings, SchedulingSettings, ServeConfig
from ppserve.core.architecture import Architecture
from ppserve.core.partition import ExpectedWorkload, PartCosts
from ppserve.errors import ConfigError
from ppserve.head.starting import compare_shapes
from ppserve.planning.shapes import shape_name
from tests.hellos import hello

GPT2 = Architecture(12, 768, 12, 1024, 50257, 50257, 3072)
# As on a core where reading the weights takes most of a step.
READS = PartCosts(attention=1e-3, mlp=2e-3, overhead=0.5e-3, head=13e-3)
HALF = PartCosts(attention=0.5e-3, mlp=1e-3, overhead=0.5e-3, head=7e-3)


def hellos(count: int, **about: Any) -> list[wire.Hello]:
    cores, costs = about.pop("cores", 0), about.pop("costs", {1: READS, 2: HALF})
    host = wire.StageHost("here", about.pop("machine", "one"), cores=cores)
    device = wire.StageDevice(**{"memory_bytes": 4 << 30, "kv_bytes": 2 << 30, **about})
    return [changed(hello(rank, count, GPT2, host, device=device), costs=costs) for rank in range(count)]


def apart(**about: Any) -> list[wire.Hello]:
    """Of two ranks on two hosts."""
    first, second = hellos(2, **about)
    return [first, changed(second, host=wire.StageHost("there", "another"))]


def config(callers: int = 16, threads: int | None = None) -> ServeConfig:
    scheduling = SchedulingSettings(expect=ExpectedWorkload(32, 32, callers))
    return ServeConfig(pipeline=PipelineSettings(parallel="auto", threads=threads), scheduling=scheduling)


def rates(asked: ServeConfig, of: list[wire.Hello]) -> dict[str, float]:
    return {shape_name(p.grid): p.tokens_per_s or 0.0 for p in compare_shapes(asked, of)}


def test_the_shape_follows_from_the_load_and_the_network() -> None:
    one_host = rates(config(), hellos(2))
    assert list(one_host) == ["2x1x1", "1x1x2", "1x2x1"], "weights are read once for all callers"
    assert rates(config(), apart())["2x1x1"] < one_host["2x1x1"], "gathers between hosts take longer"


def test_tensor_ranks_are_predicted_by_what_they_measured_as_such() -> None:
    """Not as their share of the whole model: small operators are not divided."""
    slow = {1: READS, 2: replace(READS, overhead=1e-3)}
    assert next(iter(rates(config(), hellos(2, costs=slow)))) != "2x1x1"


def test_the_mean_of_all_ranks_counts() -> None:
    first, second = hellos(2)
    slower, doubled = (
        {count: replace(costs, head=factor * costs.head) for count, costs in ((1, READS), (2, HALF))}
        for factor in (3, 2)
    )
    mixed = rates(config(), [first, changed(second, costs=slower)])
    assert mixed == pytest.approx(rates(config(), hellos(2, costs=doubled)))


def test_ranks_share_the_cores_of_their_machine() -> None:
    own, scarce = (rates(config(threads=1), hellos(2, cores=cores)) for cores in (2, 1))
    assert own == pytest.approx(rates(config(threads=1), hellos(2, cores=8)))
    assert scarce["2x1x1"] == pytest.approx(own["2x1x1"] / 2, rel=0.05)
    assert rates(config(threads=1), apart(cores=1))["1x1x2"] > 1.8 * scarce["1x1x2"]
    assert rates(config(threads=2), hellos(2, cores=2)) == pytest.approx(scarce), "each rank keeps two cores busy"


def test_what_does_not_fit_is_not_taken() -> None:
    found = compare_shapes(config(), hellos(2, memory_bytes=640 << 20))
    assert {shape_name(p.grid) for p in found if p.fits} == {"2x1x1", "1x2x1"}
    with pytest.raises(ConfigError, match="--parallel: auto: no shape of 2 ranks holds this model"):
        compare_shapes(config(), hellos(2, memory_bytes=100 << 20))


def test_a_quarter_of_what_the_weights_leave_is_for_keys_and_values_unless_told() -> None:
    room = {"memory_bytes": (622 << 20) + (100 << 20), "kv_bytes": 80 << 20}
    fits = {shape_name(p.grid): p.fits for p in compare_shapes(config(), hellos(2, **room))}
    assert fits == {"1x1x2": False, "1x2x1": True, "2x1x1": True}, "one full sequence takes 72 MiB"
    told = replace(config(), cache=CacheSettings(kv_cache_memory=80 << 20))
    assert all(p.fits for p in compare_shapes(told, hellos(2, **room)))


def test_a_rank_that_was_started_otherwise_is_refused() -> None:
    with pytest.raises(ConfigError, match="--parallel: auto: not every rank was started with it"):
        compare_shapes(config(), [*hellos(1), *hellos(2, costs={1: READS})[1:]])
