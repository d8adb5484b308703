"""SmolLM2-135M-Instruct as people get it: transformers' numbers, the model's template, an answer that is right."""

from __future__ import annotations

import pytest
import torch

from ppserve.errors import CheckpointError
from ppserve.model.checkpoint.fetching import fetched
from ppserve.model.checkpoint.opening import open_checkpoint
from ppserve.tokenizer import load_tokenizer, read_chat_format
from tests.model.pipelines import Pipeline
from tests.model.test_ladder import as_transformers

pytestmark = [pytest.mark.slow, pytest.mark.smollm2]


def test_logits_and_tokens_are_those_of_transformers_and_it_knows_paris() -> None:
    try:
        path = str(fetched("smollm2"))
    except CheckpointError as error:
        pytest.skip(str(error))
    checkpoint, tokenizer = open_checkpoint(path), load_tokenizer(path)
    template = read_chat_format(path).template
    assert template is not None
    assert "<|im_start|>" in template
    start, end = (tokenizer.special_ids[name] for name in ("<|im_start|>", "<|im_end|>"))
    question = tokenizer.encode("user\nWhat is the capital of France?")
    ids = (start, *question, end, *tokenizer.encode("\n"), start, *tokenizer.encode("assistant\n"))
    pipeline = Pipeline(checkpoint, "17,13", num_sequences=1)
    ours = pipeline.logits(pipeline.hidden(ids, 7))
    answer = [drawn.token_id for drawn in pipeline.generate(ids, 12)]
    model, rotary = as_transformers(checkpoint), checkpoint.architecture.rotary
    assert rotary is not None
    with torch.inference_mode():
        model.model.rotary_emb.inv_freq.copy_(torch.tensor(rotary.frequencies))
        theirs = model(torch.tensor([[*ids, *answer[:-1]]])).logits[0]
    torch.testing.assert_close(ours, theirs[: len(ids)], atol=1e-3, rtol=0)
    assert answer == theirs[len(ids) - 1 :].argmax(-1).tolist()
    assert "Paris" in tokenizer.decode(token for token in answer if token is not None)
