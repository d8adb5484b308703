"""The makers of models: what they promise is what comes out."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest
import tiktoken
import torch
import transformers
from tiktoken_ext.openai_public import r50k_pat_str

from tools import make_random_gpt2 as random_maker
from tools import make_tiny_model as tiny_maker
from tools.byte_pairs import learn_ranks, recover_merges
from tools.make_random_gpt2 import gpt2_config
from tools.tiny_stories import story

TINY = Path(__file__).parents[1] / "ppserve/assets/tiny"


def test_stories_come_from_their_seed_alone() -> None:
    first, again, other = ([story(rng) for _ in range(20)] for rng in map(random.Random, (3, 3, 4)))
    assert first == again
    assert first != other
    assert len(set(first)) == len(first)
    assert not set("{}[]") & set("".join(first)), "nothing is left unexpanded"


def test_byte_pairs_join_the_most_frequent_first() -> None:
    ranks = learn_ranks("low lower lowest slow", r50k_pat_str, 260)
    learned = [token for token, rank in sorted(ranks.items(), key=lambda item: item[1]) if rank >= 256]
    assert learned[:2] == [b"lo", b"low"]
    assert recover_merges(ranks)[:2] == [(b"l", b"o"), (b"lo", b"w")]


def test_merges_of_a_vocabulary_out_of_order_cannot_be_recovered() -> None:
    ranks = {bytes([b]): b for b in range(256)} | {b"abc": 256, b"ab": 257}
    with pytest.raises(ValueError, match="token 256"):
        recover_merges(ranks)


@pytest.fixture(scope="module")
def encoding() -> tiktoken.Encoding:
    return tiny_maker.learn_vocabulary(tiny_maker.Shape(), seed=1)


@pytest.mark.slow
def test_the_built_in_vocabulary_is_the_one_its_maker_learns(encoding: tiktoken.Encoding) -> None:
    ranks = random_maker.read_ranks(TINY / "tokenizer.tiktoken")
    assert {encoding.decode_single_token_bytes(rank): rank for rank in range(len(ranks))} == ranks


def test_the_built_in_config_is_the_one_its_maker_writes(encoding: tiktoken.Encoding) -> None:
    sizes = asdict(tiny_maker.Shape())
    del sizes["num_ranks"]
    config = gpt2_config(**sizes, vocab_size=encoding.n_vocab, dtype="bfloat16")
    assert json.dumps(config, indent=2) + "\n" == (TINY / "config.json").read_text()


@pytest.mark.slow
def test_the_built_in_model_knows_its_stories(encoding: tiktoken.Encoding) -> None:
    tiny_model = transformers.GPT2LMHeadModel.from_pretrained(TINY, dtype=torch.float32)
    ids_NT, targets_NT = tiny_maker.Corpus(encoding, seed=123, noise_share=0.0).windows(4, 512)
    with torch.no_grad():
        logits_NTV = tiny_model(ids_NT).logits
    loss = torch.nn.functional.cross_entropy(logits_NTV.flatten(0, 1), targets_NT.flatten())
    assert loss < 0.7  # nats per token; uniform guessing costs 7.2


@pytest.mark.slow
def test_a_random_model_loads_in_transformers_and_comes_from_its_seed(tmp_path: Path) -> None:
    shape = random_maker.Shape(num_layers=2, width=48, num_heads=3, max_positions=64, vocab_size=300)
    written = []
    for name, seed in (("a", 0), ("again", 0), ("other", 1)):
        random_maker.write_checkpoint(tmp_path / name, shape, seed)
        written.append((tmp_path / name / "model.safetensors").read_bytes())
    assert written[0] == written[1]
    assert written[0] != written[2]
    model, report = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "a", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert sum(p.numel() for p in model.parameters()) == 300 * 48 + 64 * 48 + 2 * (12 * 48 * 48 + 13 * 48) + 2 * 48
