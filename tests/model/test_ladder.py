"""The rungs from a plain model to ours: blocks + cache = reference, however it is cut. `checkpoint/parity.py` has
transformers beside ours."""

from __future__ import annotations

import pytest
import torch

from ppserve.core.architecture import Architecture, Split, stage_layouts, stage_params
from ppserve.core.plan import Draw
from ppserve.core.request import SamplingParams
from ppserve.model.backend import Backend
from ppserve.model.checkpoint.families import FAMILIES
from ppserve.model.cpu.backend import CpuBackend
from ppserve.model.decoder import load_stage
from tests.model.pipelines import BACKENDS, GREEDY_DRAW, Pipeline, prompt
from tests.model.random_checkpoint import RandomCheckpoint, architecture, llama
from tests.reference import Reference

SHAPES = {
    "4 heads of 12": architecture(width=48, num_heads=4),
    "12 heads of 5, odd": architecture(width=60, num_heads=12),
    "25 heads of 64": architecture(width=1600, num_heads=25, num_layers=1, inner_width=320),
    "head size 80": architecture(width=160, num_heads=2),
    "head size 128": architecture(width=256, num_heads=2, inner_width=200),
    "untied": architecture(width=100, num_heads=4, tied_embeddings=False),
    "no biases": architecture(biases=False),
    "padded vocabulary": architecture(padded_vocab_size=256),
    "scaled by layer": architecture(num_layers=4, scale_attn_by_inverse_layer_idx=True),
    "unscaled": architecture(width=48, num_heads=12, scale_attn_weights=False),
    "llama: 4 heads over 2": llama(),
    "llama: 9 heads over 3": llama(num_layers=1, width=576, heads=9, kv_heads=3, head_width=64),
    "llama: tied": llama(tied_embeddings=True),
    "llama: 6 heads of 10 over 2, odd": llama(width=42, heads=6, kv_heads=2, head_width=10, inner_width=70),
    "mistral: as many heads of keys": llama(width=40, heads=4, kv_heads=4, head_width=10),
    "qwen 2: biases": llama(width=60, heads=6, kv_heads=2, head_width=10, qkv_biases=True),
    "qwen 3: norms, wide heads": llama(width=40, heads=4, kv_heads=2, head_width=32, qk_norms=True),
}


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
@pytest.mark.parametrize("arch", SHAPES.values(), ids=SHAPES.keys())
def test_cache_and_blocks_are_the_reference(arch: Architecture, backend: Backend) -> None:
    checkpoint = RandomCheckpoint(arch)
    ids = prompt(50)
    pipeline = Pipeline(checkpoint, str(arch.num_layers), backend=backend, num_sequences=1)
    pipeline.step([pipeline.slice(0, ids[:37], 0)])
    hidden, _, _ = pipeline.step([pipeline.slice(0, ids[37:], 37)])
    expected = Reference(checkpoint).logits(ids)[37:]
    torch.testing.assert_close(pipeline.logits(hidden), expected, atol=1e-4, rtol=1e-5)
    assert expected.std() > 0.5, "logits too close together to tell a wrong model from a right one"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("split", ["2,2", "1,1,1,1", "3,1", "2.5,1.5", "1.5,1,1.5"])
@pytest.mark.parametrize(
    "arch", [architecture(num_layers=4, scale_attn_by_inverse_layer_idx=True), llama(num_layers=4)], ids=FAMILIES
)
def test_where_the_stages_are_cut_changes_no_bit(arch: Architecture, split: str, dtype: str) -> None:
    checkpoint = RandomCheckpoint(arch)
    whole, cut = (Pipeline(checkpoint, s, dtype, num_sequences=1) for s in ("4", split))
    assert torch.equal(whole.hidden(prompt(30), 30), cut.hidden(prompt(30), 30))
    assert whole.generate(prompt(30), 8) == cut.generate(prompt(30), 8)


def test_bfloat16_stays_near_the_reference() -> None:
    checkpoint = RandomCheckpoint(SHAPES["4 heads of 12"])
    pipeline = Pipeline(checkpoint, "2", "bfloat16")
    theirs = Reference(checkpoint, "bfloat16").logits(prompt(40))
    ours = pipeline.logits(pipeline.hidden(prompt(40), 40))
    assert (ours - theirs).abs().max() < 0.03 * theirs.abs().max()


def test_padded_vocabulary_is_never_drawn() -> None:
    """A padding row that would win by far."""

    class Tempting(RandomCheckpoint):
        def _whole(self, name: str) -> torch.Tensor:
            tensor = super()._whole(name)
            if name in ("wte.weight", "lm_head.weight"):
                tensor[self.architecture.vocab_size :] = 1e6
            return tensor

    arch = SHAPES["padded vocabulary"]
    tempted, plain = (Pipeline(checkpoint, "2") for checkpoint in (Tempting(arch), RandomCheckpoint(arch)))
    for draw in (GREEDY_DRAW, Draw(SamplingParams(temperature=1.5, seed=3))):
        assert tempted.generate(prompt(9), 12, draw) == plain.generate(prompt(9), 12, draw)


@pytest.mark.parametrize("split", ["1,2,1", "1.5,1,1.5"])
@pytest.mark.parametrize("arch", [architecture(num_layers=4), llama(num_layers=4, qk_norms=True)], ids=FAMILIES)
def test_a_stage_reads_only_its_own_tensors_and_reports_progress(arch: Architecture, split: str) -> None:
    seen: list[tuple[int, int]] = []
    for layout in stage_layouts(Split.parse(split)):
        checkpoint = RandomCheckpoint(arch)
        seen.clear()
        stage = load_stage(checkpoint, layout, CpuBackend("float32"), lambda *at: seen.append(at))
        for part, layers in (("attn", layout.attentions), ("mlp", layout.mlps)):
            read = {int(name.split(".")[1]) for name in checkpoint.asked if f".{part}." in name}
            assert read == set(layers)
        assert ("wte.weight" in checkpoint.asked) == layout.is_first
        assert ("lm_head.weight" in checkpoint.asked) == layout.is_last
        assert stage.num_params == stage_params(arch, layout)
        assert seen == sorted(seen)
        assert seen[-1] == (4 * stage.num_params, 4 * stage.num_params)
