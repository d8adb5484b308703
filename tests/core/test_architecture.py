"""Which layers and sublayers a stage has."""

import pytest

from ppserve.core.architecture import Architecture, Split, stage_layouts, stage_params


@pytest.mark.parametrize(
    ("written", "spans", "attentions", "mlps"),
    [
        ("12", ["0-11"], [range(12)], [range(12)]),
        ("9,3", ["0-8", "9-11"], [range(9), range(9, 12)], [range(9), range(9, 12)]),
        ("2.5,1.5", ["0-2a", "2m-3"], [range(3), range(3, 4)], [range(2), range(2, 4)]),
        ("1.5,1,1.5", ["0-1a", "1m-2a", "2m-3"], [range(2), range(2, 3), range(3, 4)],
         [range(1), range(1, 2), range(2, 4)]),
        ("1,1", ["0", "1"], [range(1), range(1, 2)], [range(1), range(1, 2)]),
    ],
)  # fmt: skip
def test_what_a_split_gives_to_each_stage(written, spans, attentions, mlps):
    split = Split.parse(written)
    layouts = stage_layouts(split)
    assert str(split) == written, "as the flag takes it"
    assert [layout.span for layout in layouts] == spans
    assert [layout.attentions for layout in layouts] == attentions
    assert [layout.mlps for layout in layouts] == mlps
    assert tuple(layout.num_sublayers for layout in layouts) == split.sublayers
    assert sum(layout.layer_weights for layout in layouts) == pytest.approx(sum(split.sublayers) / 2)


def test_a_cut_layer_counts_once_and_a_tied_embedding_once_in_the_model_and_twice_in_its_stages():
    tied = Architecture(4, 64, 4, 128, 257, 320, 256)
    untied = Architecture(4, 64, 4, 128, 257, 320, 256, tied_embeddings=False)
    for split in ("2,2", "2.5,1.5"):
        layouts = stage_layouts(Split.parse(split))
        assert sum(stage_params(untied, layout) for layout in layouts) == untied.num_params
        assert sum(stage_params(tied, layout) for layout in layouts) == tied.num_params + 257 * 64


@pytest.mark.parametrize("text", ["8.75,3.25", "nan,3", "inf,3", "9;3", ""])
def test_what_is_no_split(text):
    with pytest.raises(ValueError, match="is not a list of layers per stage such as"):
        Split.parse(text)
