"""Where a stage's parts begin and end."""

import pytest

from ppserve.core.architecture import Architecture, stage_layouts, stage_params, written


@pytest.mark.parametrize(
    ("split", "blocks", "attentions", "mlps"),
    [
        ((12,), ["0-11"], [range(12)], [range(12)]),
        ((9, 3), ["0-8", "9-11"], [range(9), range(9, 12)], [range(9), range(9, 12)]),
        ((2.5, 1.5), ["0-2a", "2m-3"], [range(3), range(3, 4)], [range(2), range(2, 4)]),
        ((1.5, 1, 1.5), ["0-1a", "1m-2a", "2m-3"], [range(2), range(2, 3), range(3, 4)],
         [range(1), range(1, 2), range(2, 4)]),
        ((1, 1), ["0", "1"], [range(1), range(1, 2)], [range(1), range(1, 2)]),
    ],
)  # fmt: skip
def test_what_a_split_gives_to_each_stage(split, blocks, attentions, mlps):
    layouts = stage_layouts(split)
    assert [layout.blocks for layout in layouts] == blocks
    assert [layout.attentions for layout in layouts] == attentions
    assert [layout.mlps for layout in layouts] == mlps
    assert tuple(layout.num_layers for layout in layouts) == split
    assert sum(layout.block_weights for layout in layouts) == pytest.approx(sum(split))


def test_a_cut_block_is_counted_once():
    arch = Architecture(4, 64, 4, 128, 257, 320, 256)
    whole = sum(stage_params(arch, layout) for layout in stage_layouts((2, 2)))
    assert sum(stage_params(arch, layout) for layout in stage_layouts((2.5, 1.5))) == whole


def test_a_split_is_written_as_the_flag_takes_it():
    assert written((9, 3)) == written((9.0, 3.0)) == "9,3"
    assert written((7.5, 4.5)) == "7.5,4.5"
