"""Which shape is chosen for ranks, by what they say of themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from ppserve import wire
from ppserve.config import PipelineSettings, SchedulingSettings, ServeConfig
from ppserve.core.architecture import Architecture
from ppserve.core.cost_model import Coefficients, LayerCosts
from ppserve.errors import ConfigError
from ppserve.head.shape import compare_shapes
from ppserve.planning.shapes import shape_name

GPT2 = Architecture(12, 768, 12, 1024, 50257, 50257, 3072)
# As on a core where reading the weights takes most of a step.
READS = LayerCosts(Coefficients(step=2.5e-3, row=1e-5, key=1e-8), Coefficients(step=13e-3, sample=1e-4))


def hellos(count: int, **about: Any) -> list[wire.Hello]:
    said: dict[str, Any] = {"speed": READS, "memory_bytes": 4 << 30, "kv_bytes": 2 << 30, "machine": "one"} | about
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
    apart = hellos(2, speed=READS)
    apart[1] = replace_machine(apart[1], "another")
    tensor = {shape_name(p.grid): p.output_tokens_per_s for p in compare_shapes(config(), apart)}
    together = {shape_name(p.grid): p.output_tokens_per_s for p in one_host}
    assert tensor["2x1x1"] < together["2x1x1"], "gathers between hosts take longer"


def test_what_does_not_fit_is_not_chosen() -> None:
    found = compare_shapes(config(), hellos(2, memory_bytes=500 << 20))
    assert [shape_name(each.grid) for each in found if each.outcome is None] == ["1x1x2"]
    with pytest.raises(ConfigError, match="no shape of 2 ranks"):
        compare_shapes(config(), hellos(2, memory_bytes=100 << 20))


def test_a_rank_that_did_not_measure_is_named() -> None:
    with pytest.raises(ConfigError, match="not every rank was started with it"):
        compare_shapes(config(), [*hellos(1), *hellos(2, speed=None)[1:]])


def replace_machine(hello: wire.Hello, machine: str) -> wire.Hello:
    return msgspec.structs.replace(hello, machine=machine)


def test_costs_are_the_mean_of_the_ranks() -> None:
    other = replace(READS, layer=READS.layer.times(3))
    assert LayerCosts.mean([READS, other]).layer == READS.layer.times(2)
    assert LayerCosts.mean([READS, other]).head == READS.head
