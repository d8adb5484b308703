"""Which shape is chosen for ranks, by what they say of themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from ppserve import wire
from ppserve.config import CacheSettings, PipelineSettings, SchedulingSettings, ServeConfig, ServerSettings
from ppserve.core.architecture import Architecture
from ppserve.core.cost_model import Coefficients, LayerCosts
from ppserve.errors import ConfigError
from ppserve.head import shape
from ppserve.head.shape import compare_shapes
from ppserve.planning.forecast import Intent
from ppserve.planning.machine import Wires
from ppserve.planning.shapes import Conditions, Prospect, shape_name

GPT2 = Architecture(12, 768, 12, 1024, 50257, 50257, 3072)
# As on a core where reading the weights takes most of a step.
READS = LayerCosts(Coefficients(step=2.5e-3, row=1e-5, key=1e-8), Coefficients(step=13e-3, sample=1e-4), 1e-3)
HALF = LayerCosts(READS.layer.times(0.5), READS.head.times(0.5), 1e-3)


def hellos(count: int, **about: Any) -> list[wire.Hello]:
    said: dict[str, Any] = {"memory_bytes": 4 << 30, "kv_bytes": 2 << 30, "machine": "one"}
    said |= {"speed": {1: READS, 2: HALF}} | about
    return [
        wire.Hello(rank, count, "here", "/m", GPT2, "float32", None, False, None, **said) for rank in range(count)
    ]


def config(callers: int = 16) -> ServeConfig:
    scheduling = SchedulingSettings(expect_prompt=32, expect_new=32, expect_callers=callers)
    return ServeConfig(pipeline=PipelineSettings(parallel="auto"), scheduling=scheduling)


def test_the_shape_follows_from_the_load_and_the_network() -> None:
    one_host = compare_shapes(config(), hellos(2))
    assert {shape_name(each.grid) for each in one_host} == {"2x1x1", "1x2x1", "1x1x2"}
    assert shape_name(one_host[0].grid) == "2x1x1", "weights are read once for all callers"
    apart = hellos(2)
    apart[1] = replace_machine(apart[1], "another")
    tensor = {shape_name(p.grid): p.output_tokens_per_s for p in compare_shapes(config(), apart)}
    together = {shape_name(p.grid): p.output_tokens_per_s for p in one_host}
    assert tensor["2x1x1"] < together["2x1x1"], "gathers between hosts take longer"


def test_tensor_ranks_are_predicted_by_what_they_measured_as_such() -> None:
    """Not as their share of the whole model: the small operators are not shared out."""
    slow = {1: READS, 2: LayerCosts(READS.layer.times(0.9), READS.head)}
    assert shape_name(compare_shapes(config(), hellos(2, speed=slow))[0].grid) != "2x1x1"


def test_cores_are_shared_with_the_head_and_its_callers() -> None:
    """As many ranks as cores: what head and callers compute is missing to the ranks."""

    def rates(cores: int, host: str = "localhost") -> dict[str, float]:
        settings = PipelineSettings(parallel="auto", threads=1)
        asked = replace(config(), pipeline=settings, server=ServerSettings(host=host))
        return {shape_name(p.grid): p.output_tokens_per_s for p in compare_shapes(asked, hellos(2, cores=cores))}

    alone, scarce, one = rates(0), rates(2), rates(1)
    assert rates(8) == pytest.approx(alone, rel=1e-3)
    assert all(0.5 * alone[name] < scarce[name] < alone[name] for name in alone)
    assert all(one[name] < 0.6 * alone[name] for name in alone)
    elsewhere = rates(2, host="0.0.0.0")
    assert all(scarce[name] < elsewhere[name] < alone[name] for name in alone), "callers are on other machines"


def test_what_ranks_do_around_a_step_takes_time_in_every_shape() -> None:
    def rates(around_s: float) -> dict[str, float]:
        speed = {count: replace(one, around_s=around_s) for count, one in ((1, READS), (2, HALF))}
        found = compare_shapes(config(), hellos(2, speed=speed))
        return {shape_name(each.grid): each.output_tokens_per_s for each in found}

    none, much = rates(0.0), rates(20e-3)
    assert all(much[name] < 0.8 * none[name] for name in none)


def test_all_that_interpreted_code_costs_is_in_proportion_to_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathers too, where shared memory carries them."""

    def wires(around_s: float, machine: str) -> Wires:
        speed = {count: replace(one, around_s=around_s) for count, one in ((1, READS), (2, HALF))}
        first, second = hellos(2, speed=speed)
        compare_shapes(config(), [first, replace_machine(second, machine)])
        return asked[-1].wires

    asked: list[Conditions] = []

    def prospects(_arch: Architecture, _intent: Intent, _world: int, under: Conditions) -> list[Prospect]:
        asked.append(under)
        return []

    monkeypatch.setattr(shape, "prospects", prospects)
    slow, fast = wires(2e-3, "one"), wires(1e-3, "one")
    ours = ("head_s", "report_s", "telling_s", "prepare_s", "sending_s", "gather_s", "spin_s")
    for name in ours:
        assert 0 < getattr(slow, name) == pytest.approx(2 * getattr(fast, name)), name
    assert wires(2e-3, "another").gather_s == wires(1e-3, "another").gather_s > slow.gather_s


def test_what_does_not_fit_is_not_chosen() -> None:
    found = compare_shapes(config(), hellos(2, memory_bytes=640 << 20))
    assert [shape_name(each.grid) for each in found if not each.fits] == ["1x1x2"]
    with pytest.raises(ConfigError, match="--parallel: auto: no shape of 2 ranks"):
        compare_shapes(config(), hellos(2, memory_bytes=100 << 20))


def test_on_cpus_the_cache_is_a_quarter_of_what_the_weights_leave() -> None:
    """As after loading: what a rank says before that is a quarter of what was free."""
    room: dict[str, Any] = {"memory_bytes": 800 << 20, "kv_bytes": 200 << 20}
    fits = {shape_name(p.grid): p.fits for p in compare_shapes(config(), hellos(2, **room))}
    weights = {
        shape_name(p.grid): max(s.weight_bytes for s in p.plan.stages) for p in compare_shapes(config(), hellos(2))
    }
    needed = 1024 * 2 * 768 * 12 * 4  # of a sequence, where one rank has all layers
    assert ((800 << 20) - weights["1x1x2"]) // 4 < needed < 200 << 20
    assert fits == {"2x1x1": True, "1x2x1": True, "1x1x2": False}
    told = replace(config(), cache=CacheSettings(kv_cache_memory=200 << 20))
    assert all(p.fits for p in compare_shapes(told, hellos(2, **room)))


def test_a_rank_that_did_not_measure_is_named() -> None:
    with pytest.raises(ConfigError, match="not every rank was started with it"):
        compare_shapes(config(), [*hellos(1), *hellos(2, speed=None)[1:]])


def replace_machine(hello: wire.Hello, machine: str) -> wire.Hello:
    return msgspec.structs.replace(hello, machine=machine)


def test_costs_are_the_mean_of_the_ranks() -> None:
    other = replace(READS, layer=READS.layer.times(3), around_s=2e-3)
    assert LayerCosts.mean([READS, other]).layer == READS.layer.times(2)
    assert LayerCosts.mean([READS, other]).head == READS.head
    assert LayerCosts.mean([READS, other]).around_s == 1.5e-3
