from dataclasses import replace
from typing import Any

import pytest

from ppserve.cli.types import SIZE
from ppserve.core.architecture import Split
from ppserve.core.layers import Experts
from ppserve.errors import ConfigError
from ppserve.planning.fitting import check_fits
from ppserve.planning.forecast import Forecast, ForecastRequest, forecast, render
from tests.architectures import gpt2 as gpt2_architecture

GPT2 = gpt2_architecture(12, 768, 12, 1024, 50257, 50257, 3072)
CEREBRAS_13B = gpt2_architecture(40, 5120, 40, 2048, 50257, 50257, 20480, activation="gelu")
GiB = 1 << 30


def test_gpt2_on_two_stages():
    plan = forecast(GPT2, ForecastRequest(2, kv_cache_memory=GiB))
    assert plan.arch.num_params == 124_439_808
    assert plan.split == Split.parse("9,3")
    assert [s.num_parameters for s in plan.stages] == [103_174_656, 59_862_528]
    assert [s.weight_bytes for s in plan.stages] == [4 * 103_174_656, 4 * 59_862_528]
    assert [s.kv_bytes_per_token for s in plan.stages] == [9 * 2 * 768 * 4, 3 * 2 * 768 * 4]
    assert plan.tightest.layout.stage == 0
    assert plan.max_sequences == GiB // (9 * 2 * 768 * 4) // 16 // 64
    assert (plan.balance["decode"], plan.balance["prefill"]) == pytest.approx((0.97, 0.67), abs=0.01)


def test_one_stage_counts_a_tied_embedding_once_and_keeps_its_head_apart():
    plan = forecast(GPT2, ForecastRequest(1))
    assert plan.stages[0].weight_bytes == 4 * (124_439_808 + 50257 * 768)
    assert plan.stages[0].num_parameters == plan.arch.num_params == 124_439_808
    untied = gpt2_architecture(12, 768, 12, 1024, 50257, 50257, 3072, tied_embeddings=False)
    assert forecast(untied, ForecastRequest(1)).stages[0].num_parameters == 124_439_808 + 50257 * 768


def test_13b_on_eight_stages():
    plan = forecast(CEREBRAS_13B, ForecastRequest(8, dtype="bfloat16", kv_dtype="bfloat16", stage_memory=16 * GiB))
    assert plan.arch.num_params == pytest.approx(12.85e9, rel=1e-3)
    assert plan.split == Split.parse("5.5,5,5,5,5,5,5,4.5")
    even = forecast(CEREBRAS_13B, ForecastRequest(8, layers=Split((10,) * 8)))
    assert (plan.balance["decode"], even.balance["decode"]) == pytest.approx((0.930, 0.877), abs=1e-3)
    assert sum(s.weight_bytes for s in plan.stages) == pytest.approx(2 * 13.11e9, rel=1e-3)
    assert 50 <= plan.max_sequences <= 60


def test_int8_experts_are_all_held():
    """Four experts in each of two layers: a byte for every weight of each, a scale for every output. The router
    keeps its type."""
    plain = gpt2_architecture(2, 64, 4, 128, 100, 100, 256)
    experts = plain.with_layers(lambda layer: replace(layer, mlp=replace(layer.mlp, experts=Experts(4, 2))))
    one, four = (forecast(arch, ForecastRequest(1, quantization="int8")).stages[0] for arch in (plain, experts))
    weights, outputs, biases, router = 2 * 64 * 256, 256 + 64, 256 + 64, 4 * 64
    more = 2 * (3 * (weights + 4 * outputs + 4 * biases) + 4 * router)
    assert four.weight_bytes - one.weight_bytes == more


def test_int8_weights_and_keys_and_values():
    """GPT-2 124M: 85 M weights of layers and 38.6 M of the head in a byte each, a scale for each output."""
    plan = forecast(GPT2, ForecastRequest(1, quantization="int8", kv_dtype="int8"))
    layers, outputs = 12 * 12 * 768**2, 12 * (4 * 768 + 3072 + 768)
    head, positions = 50257 * 768, 1024 * 768
    biases_and_norms = 12 * (9 * 768 + 4 * 768) + 2 * 768
    expected = layers + head + 4 * (outputs + 50257) + 4 * (head + positions + biases_and_norms)
    assert plan.stages[0].weight_bytes == expected
    assert plan.stages[0].kv_bytes_per_token == 12 * 2 * (768 + 4 * 12)
    assert plan.stages[0].num_parameters == 124_439_808
    first = render("gpt2", plan).splitlines()[0]
    assert first.endswith("float32, int8 weights, int8 keys and values, context 1024")


@pytest.mark.parametrize(("num_blocks", "num_sequences"), [(6, 0), (7, 1), (13, 1), (14, 2)])
def test_a_sequence_takes_whole_blocks(num_blocks: int, num_sequences: int) -> None:
    """A context of 100 tokens takes seven blocks of 16, the last of them in part."""
    block_bytes = 16 * 12 * 2 * 768 * 4
    plan = forecast(
        GPT2, ForecastRequest(1, max_model_len=100, kv_cache_memory=num_blocks * block_bytes + block_bytes - 1)
    )
    assert plan.stages[0].kv_bytes_per_token * 16 == block_bytes
    assert plan.max_sequences == num_sequences


def test_weights_that_do_not_fit():
    plan = forecast(CEREBRAS_13B, ForecastRequest(2, dtype="float32", stage_memory=16 * GiB))
    assert plan.max_sequences == 0
    assert "balance" not in render("13b", plan)
    with pytest.raises(ConfigError, match=r"^--stage-memory: 16 GiB is .* GiB too little: a stage needs "):
        check_fits(plan, kv_follows=True)


@pytest.mark.parametrize("stage_memory", [13 * GiB, 16 * GiB, 30 * GiB, 60 * GiB])
@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("kv_cache_memory", [None, GiB // 4])
def test_each_way_out_that_is_proposed_fits(
    stage_memory: int, num_stages: int, kv_cache_memory: int | None
) -> None:
    """A number of stages and a context are the least and the longest that do."""
    asked = ForecastRequest(num_stages, stage_memory=stage_memory, kv_cache_memory=kv_cache_memory)
    plan = forecast(CEREBRAS_13B, asked)
    if plan.max_sequences:
        check_fits(plan, kv_follows=True)
        return
    with pytest.raises(ConfigError) as refused:
        check_fits(plan, kv_follows=True)
    ways = str(refused.value).partition("; this fits: ")[2].split(" or ")
    assert len(ways) > 1
    kinds = {"--stages": int, "--max-model-len": int, "--dtype": str, "--quantization": str}
    names = {"--stages": "num_stages"}
    for way in ways:
        words = way.split()
        changed: dict[str, Any] = {}
        for flag, value in zip(words[::2], words[1::2], strict=True):
            read = kinds.get(flag, SIZE)
            changed[names.get(flag, flag.removeprefix("--").replace("-", "_"))] = read(value)
        kv_dtype = changed.get("dtype", asked.kv_dtype)
        assert forecast(CEREBRAS_13B, replace(asked, **changed, kv_dtype=kv_dtype)).max_sequences > 0, way
        for name, step in (("num_stages", -1), ("max_model_len", asked.block_size)):
            if len(words) == 2 and name in changed:
                beyond = replace(asked, **{name: changed[name] + step})
                assert forecast(CEREBRAS_13B, beyond).max_sequences == 0, way


def table(plan: Forecast) -> list[list[str]]:
    return [line.split() for line in render("gpt2", plan).splitlines()]


def test_the_table():
    lines = table(forecast(GPT2, ForecastRequest(2, kv_cache_memory=GiB)))
    assert " ".join(lines[0]) == "gpt2: 124.4 M parameters, 12 layers of width 768, float32, context 1024"
    assert " ".join(lines[3]) == "0 9 (0-8) 103.2 M 393.6 MiB 54 KiB 1 GiB 19,418"
    assert lines[4][:3] == ["1", "3", "(9-11)"]
    assert " ".join(lines[6]) == "18 sequences of 1024 tokens fit at once, limited by stage 0"
