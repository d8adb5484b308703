import itertools
from dataclasses import astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppserve.core.architecture import Architecture, Split, stage_layouts
from ppserve.core.partition import (
    PartCosts,
    balance,
    check_split,
    decode_parts,
    expected_step,
    measured_parts,
    split_by_cost,
    split_by_weight,
)
from ppserve.errors import ConfigError
from tests.architectures import gpt2 as gpt2_architecture


def gpt2(layers: int, width: int, heads: int) -> Architecture:
    return gpt2_architecture(layers, width, heads, 1024, 50257, 50257, 4 * width)


SMALL = gpt2(12, 768, 12)
MEDIUM = gpt2(24, 1024, 16)
LARGE = gpt2(36, 1280, 20)
XL = gpt2(48, 1600, 25)


@pytest.mark.parametrize(
    ("arch", "head_in_layers", "split", "decode", "prefill"),
    [
        (SMALL, 5.45, "9,3", 0.97, 0.67),
        (MEDIUM, 4.09, "14,10", 0.997, 0.86),
        (LARGE, 3.27, "20,16", 0.98, 0.90),
        (XL, 2.62, "25.5,22.5", 0.999, 0.947),
    ],
)
def test_two_stages_of_the_gpt2_family(arch, head_in_layers, split, decode, prefill):
    parts = decode_parts(arch)
    assert parts.head / parts.layer == pytest.approx(head_in_layers, abs=0.01)
    assert str(split_by_weight(arch, 2)) == split
    assert balance(parts.costs(Split.parse(split))) == pytest.approx(decode, abs=0.006)
    almost_headless = replace(parts, head=1e-5 * parts.head)
    assert balance(almost_headless.costs(Split.parse(split))) == pytest.approx(prefill, abs=0.006)


def test_prompts_move_layers_to_the_last_stage():
    """Only the last token of a prompt goes through the head."""
    parts = decode_parts(SMALL)
    assert split_by_cost(replace(parts, head=parts.head / 500), 12, 2) == Split.parse("6,6")
    assert balance(parts.costs(Split.parse("6,6"))) == pytest.approx(0.76, abs=0.005)


@given(
    num_layers=st.integers(1, 12),
    num_stages=st.integers(1, 5),
    parts=st.builds(PartCosts, st.floats(0.1, 5), st.floats(0.1, 5), st.floats(0, 30), st.floats(0, 30)),
)
def test_no_other_split_has_a_lighter_heaviest_stage(num_layers, num_stages, parts):
    if num_stages > num_layers:
        with pytest.raises(ConfigError, match=f"--stages: {num_stages} stages cannot share {num_layers} layer"):
            split_by_cost(parts, num_layers, num_stages)
        return
    split = split_by_cost(parts, num_layers, num_stages)
    check_split(split, gpt2(num_layers, 64, 4), num_stages)

    def lightest(step):
        cuts = itertools.combinations(range(step, 2 * num_layers, step), num_stages - 1)
        stages = ([end - begin for begin, end in itertools.pairwise((0, *cut, 2 * num_layers))] for cut in cuts)
        return min(max(parts.costs(Split(tuple(sizes)))) for sizes in stages if min(sizes) >= 2)

    found, whole, finest = max(parts.costs(split)), lightest(2), lightest(1)
    # Layers are cut only where it is worth it, and then as well as can be.
    assert found == pytest.approx(finest if finest < 0.99 * whole else whole)


@pytest.mark.parametrize("split", ["9,3", "6.5,5.5", "4,4,4"])
def test_parts_are_found_again_from_what_stages_take(split):
    """The stages take their time by weights, at any speed."""
    weights, layouts = decode_parts(SMALL), stage_layouts(Split.parse(split))
    found = measured_parts(SMALL, layouts, [2.5 * weights.stage_cost(layout) for layout in layouts])
    assert astuple(found) == pytest.approx([2.5 * cost for cost in astuple(weights)])
    quick_last = [1.0, *(0.0 for _ in layouts[1:])]
    assert measured_parts(SMALL, layouts, quick_last).head == 0.0, "never less than nothing"


def test_a_layer_is_cut_where_whole_ones_do_not_balance():
    assert split_by_cost(PartCosts(1, 2, 0, 0), 3, 2) == Split.parse("1.5,1.5")
    assert split_by_cost(PartCosts(1, 2, 0, 0), 4, 2) == Split.parse("2,2")
    assert split_by_cost(PartCosts(1, 2, 0, 4), 3, 2) == Split.parse("2,1")
    assert PartCosts(1, 2, 10, 100).costs(Split.parse("1.5,1.5")) == (10 + 4, 10 + 100 + 5)


@pytest.mark.parametrize(
    ("split", "problem"),
    [
        ("12", "--layers: 12 names 1 stage, not 2"),
        ("4,4,4", "--layers: 4,4,4 names 3 stages, not 2"),
        ("9,4", "--layers: 9,4 adds up to 13 layers, but the model has 12"),
        ("13,-1", "--layers: 13,-1 gives -1 layers to stage 1"),
        ("11.5,0.5", "--layers: 11.5,0.5 gives 0.5 layers to stage 1; each needs at least one"),
        ("9.5,3", "--layers: 9.5,3 adds up to 12.5 layers, but the model has 12"),
    ],
)
def test_an_unusable_split_says_what_is_wrong(split, problem):
    with pytest.raises(ConfigError, match=problem):
        check_split(Split.parse(split), SMALL, 2)


# ---- the step of an expected load -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_positions", "decode_at", "prompts"),
    [(1024, 192, [(56, 16)]), (150, 149, [(56, 16)]), (100, 99, [(43, 12)]), (9, 8, [(3, 1)]), (1, 0, [])],
)
def test_a_step_has_tokens_of_prompts_and_answers_in_their_ratio(
    max_positions: int, decode_at: int, prompts: list[tuple[int, int]]
) -> None:
    """Requests come as fast as they end, and no sequence is longer than the model allows."""
    step = expected_step(max_positions)
    assert [(s.start, len(s.token_ids)) for s in step.slices] == [(decode_at, 1)] * 16 + prompts
    assert sum(s.num_draws for s in step.slices) == 16
    for each in step.slices:
        assert each.start + len(each.token_ids) <= min(max_positions, 16 * len(each.block_table))
