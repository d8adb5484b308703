"""The `config.json` of the models that are made here, in Hugging Face's terms."""

from __future__ import annotations

END_OF_TEXT = "<|endoftext|>"


def gpt2_config(
    *, num_layers: int, width: int, num_heads: int, max_positions: int, vocab_size: int, dtype: str
) -> dict[str, object]:
    """Tied embeddings, GPT-2's own GELU; `<|endoftext|>` is the last token of the vocabulary."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": num_layers,
        "n_embd": width,
        "n_head": num_heads,
        "n_positions": max_positions,
        "n_ctx": max_positions,
        "vocab_size": vocab_size,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": vocab_size - 1,
        "eos_token_id": vocab_size - 1,
        "dtype": dtype,
    }
