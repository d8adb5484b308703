"""Which layers and sublayers a stage has, and what they weigh."""

from typing import Any

import pytest

from ppserve.core.architecture import Architecture, Split, stage_layouts, stage_params, sublayer_params
from tests.architectures import gpt2 as gpt2_architecture
from tests.architectures import llama as llama_architecture

GPT2 = gpt2_architecture(12, 768, 12, 1024, 50257, 50257, 3072)


def llama(width: int, heads: int, kv_heads: int, inner: int, **fields: Any) -> Architecture:
    return llama_architecture(4, width, heads, kv_heads, width // heads, 2048, 49152, inner, **fields)


LLAMA_3_8B = llama(4096, 32, 8, 14336)
QWEN_7B = llama(3584, 28, 4, 18944, qkv_biases=True)


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


@pytest.mark.parametrize(
    ("arch", "attention", "mlp"),
    [
        # Weights, biases and the norm before: those of each file's tensors.
        (GPT2, 768 * 3 * 768 + 3 * 768 + 768 * 768 + 768 + 2 * 768, 2 * 768 * 3072 + 3072 + 768 + 2 * 768),
        (llama(576, 9, 3, 1536), 576 * (576 + 2 * 192) + 576 * 576 + 576, 3 * 576 * 1536 + 576),
        (LLAMA_3_8B, 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 4096, 3 * 4096 * 14336 + 4096),
        (QWEN_7B, 3585 * (3584 + 2 * 512) + 3584 * 3584 + 3584, 3 * 3584 * 18944 + 3584),
    ],
    ids=["gpt2 0.33", "smollm2 0.25", "llama-3-8b 0.19", "qwen2.5-7b 0.13"],
)
def test_an_attention_weighs_what_it_has_of_its_layers_parameters(
    arch: Architecture, attention: int, mlp: int, request: pytest.FixtureRequest
) -> None:
    share = attention / (attention + mlp)
    assert f"{share:.2f}" == request.node.callspec.id.split()[-1]
    first, last = stage_layouts(Split.parse("2.5,1.5"))
    assert sublayer_params(arch, first) == 3 * attention + 2 * mlp
    assert sublayer_params(arch, last) == attention + 2 * mlp


def test_a_cut_layer_counts_once_and_a_tied_embedding_once_in_the_model_and_twice_in_its_stages():
    tied = gpt2_architecture(4, 64, 4, 128, 257, 320, 256)
    untied = gpt2_architecture(4, 64, 4, 128, 257, 320, 256, tied_embeddings=False)
    for split in ("2,2", "2.5,1.5"):
        layouts = stage_layouts(Split.parse(split))
        assert sum(stage_params(untied, layout) for layout in layouts) == untied.num_params
        assert sum(stage_params(tied, layout) for layout in layouts) == tied.num_params + 257 * 64


@pytest.mark.parametrize("text", ["8.75,3.25", "nan,3", "inf,3", "9;3", ""])
def test_what_is_no_split(text):
    with pytest.raises(ValueError, match="is not a list of layers per stage such as"):
        Split.parse(text)
