"""SmolLM2-135M-Instruct as people get it: transformers' numbers, the model's template, an answer that is right."""

from __future__ import annotations

import pytest
import torch
import transformers

from ppserve.errors import CheckpointError
from ppserve.model.checkpoint import Checkpoint
from ppserve.model.checkpoint.fetching import fetched
from ppserve.model.checkpoint.llama import FAMILY
from ppserve.model.checkpoint.opening import open_checkpoint
from ppserve.tokenizer import load_tokenizer, read_chat_format
from tests.model.pipelines import Pipeline

pytestmark = [pytest.mark.slow, pytest.mark.smollm2]


def as_transformers(checkpoint: Checkpoint) -> transformers.LlamaForCausalLM:
    """Return Hugging Face's model with these weights."""
    arch = checkpoint.architecture
    (rotary,) = arch.rotaries
    config = transformers.LlamaConfig(
        vocab_size=arch.padded_vocab_size,
        max_position_embeddings=arch.max_positions,
        hidden_size=arch.width,
        intermediate_size=arch.layers[0].mlp.inner_width,
        num_hidden_layers=arch.num_layers,
        num_attention_heads=arch.num_heads,
        num_key_value_heads=arch.num_kv_heads,
        rms_norm_eps=arch.final_norm.epsilon,
        tie_word_embeddings=arch.tied_embeddings,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.rotary_emb.inv_freq.copy_(torch.tensor(rotary.frequencies))
        for name, parameter in model.named_parameters():
            parameter.copy_(checkpoint.tensor(str(FAMILY.hugging_face_name(name))))
    return model


def test_logits_and_tokens_are_those_of_transformers_and_it_knows_paris() -> None:
    try:
        path = str(fetched())
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
    with torch.inference_mode():
        theirs = as_transformers(checkpoint)(torch.tensor([[*ids, *answer[:-1]]])).logits[0]
    torch.testing.assert_close(ours, theirs[: len(ids)], atol=1e-3, rtol=0)
    assert answer == theirs[len(ids) - 1 :].argmax(-1).tolist()
    assert "Paris" in tokenizer.decode(token for token in answer if token is not None)
