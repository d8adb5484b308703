"""Llama and its kin: the canonical names of their tensors in each format, and the keys of config.json.

    wte.weight (V', D)               ln_f.weight (D)                  lm_head.weight (V', D)
    h.{i}.ln_1.weight (D)            h.{i}.attn.q|k|v.weight (heads x head size, D) |bias (Qwen2)
    h.{i}.attn.o.weight (D, heads x head size)                        h.{i}.attn.q_norm|k_norm.weight (Qwen3)
    h.{i}.ln_2.weight (D)            h.{i}.mlp.gate|up.weight (F, D)  h.{i}.mlp.down.weight (D, F)

Begun for the second family: `Architecture` has no field yet for KV heads, head size, rotary positions or norms.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta

from ppserve.model.checkpoint.settings import InnerWidth, Layers, Positions, Rows, Width

HUGGING_FACE = {
    "model.embed_tokens": "wte",
    "model.norm": "ln_f",
    "lm_head": "lm_head",
    "input_layernorm": "ln_1",
    "self_attn.q_proj": "attn.q",
    "self_attn.k_proj": "attn.k",
    "self_attn.v_proj": "attn.v",
    "self_attn.o_proj": "attn.o",
    "self_attn.q_norm": "attn.q_norm",
    "self_attn.k_norm": "attn.k_norm",
    "post_attention_layernorm": "ln_2",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}
"""Without `model.layers.{i}.` in front. `rotary_emb.inv_freq` of old files is computed anew."""

GGUF = {
    "token_embd": "wte",
    "output_norm": "ln_f",
    "output": "lm_head",
    "attn_norm": "ln_1",
    "attn_q": "attn.q",
    "attn_k": "attn.k",
    "attn_v": "attn.v",
    "attn_output": "attn.o",
    "attn_q_norm": "attn.q_norm",
    "attn_k_norm": "attn.k_norm",
    "ffn_norm": "ln_2",
    "ffn_gate": "mlp.gate",
    "ffn_up": "mlp.up",
    "ffn_down": "mlp.down",
}
"""Without `blk.{i}.` in front. `rope_freqs.weight` holds the factors of `llama3` positions."""

MODEL_CLASSES: dict[str, dict[str, bool]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "Qwen2ForCausalLM": {"qkv_biases": True},
    "Qwen3ForCausalLM": {"qk_norms": True},
}


class Config(msgspec.Struct, frozen=True):
    """The keys of config.json that are read. Those without a default must be given."""

    vocab_size: Rows
    hidden_size: Width
    intermediate_size: InnerWidth
    num_hidden_layers: Layers
    num_attention_heads: Width
    max_position_embeddings: Positions
    num_key_value_heads: Width | None = None
    """None for as many as query heads."""
    head_dim: Width | None = None
    """None for the width divided by the heads."""
    hidden_act: Annotated[str, Meta(pattern=r"^(silu|gelu|gelu_pytorch_tanh)\Z")] = "silu"
    rms_norm_eps: Annotated[float, Meta(gt=0, le=1)] = 1e-6
    rope_theta: Annotated[float, Meta(gt=1)] = 10000.0
    rope_scaling: dict[str, Any] | None = None
    """By its `rope_type` (or `type`): default, linear, llama3 or yarn."""
    rope_parameters: dict[str, Any] | None = None
    """The same two keys in one, as transformers 5 writes them."""
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: Positions | None = None
    """Refused where it is shorter than what is served; Qwen's counts only with `use_sliding_window`."""
    use_sliding_window: bool = False
    eos_token_id: int | list[int] | None = None


def unpermuted(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of q or k as Hugging Face has them; a GGUF of architecture `llama` interleaves each head's halves."""
    halves = weight.view(num_heads, -1, 2, *weight.shape[1:]).transpose(1, 2)
    return halves.reshape(weight.shape)
