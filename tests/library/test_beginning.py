"""`Pipeline` puts around a text what its tokenizer puts there."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken

from ppserve import Pipeline
from tests.model.checkpoint import writers
from tests.tokenizer.made_up import loaded, made_up, surrounded


@pytest.mark.slow
def test_a_text_is_the_tokens_that_its_tokenizer_makes_of_it(tmp_path: Path) -> None:
    library = surrounded(made_up("bytes", AddedToken("<s>", special=True)), "<s> $A", "<s>")
    tokenizer = loaded(library, tmp_path)
    arch = writers.architecture(vocab_size=tokenizer.vocab_size, padded_vocab_size=tokenizer.vocab_size)
    writers.write_hf(tmp_path, arch, writers.random_tensors(arch))
    with Pipeline(tmp_path, 1, threads=1) as pipeline:
        options = {
            "max_tokens": 4,
            "temperature": 0,
            "prompt_logprobs": 0,
            "token_ids": True,
            "ignore_eos": True,
            "seed": 1,
        }
        text, ids = (pipeline.complete(prompt, **options) for prompt in ("ab a", library.encode("ab a").ids))
    assert [token.id for token in text.sequences[0].prompt_tokens] == [
        tokenizer.begin[0],
        *tokenizer.encode("ab a"),
    ]
    assert text.sequences[0] == ids.sequences[0]
