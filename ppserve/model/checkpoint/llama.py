"""Llama and its kin in checkpoints: the names of their tensors, and the keys of config.json.

All that the reference code (transformers, models/llama, mistral, qwen2, qwen3) computes with is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from ppserve.core.architecture import MAX_POSITIONS, Architecture
from ppserve.model.checkpoint import Shapes, settings, with_biases
from ppserve.model.checkpoint.family import Config, ModelFamily
from ppserve.model.checkpoint.rotary import rotary

KINDS: dict[str, dict[str, bool]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_biases": True},
    "qwen3": {"qk_norms": True},
}
"""What is not a Llama's, by `model_type`. (A GGUF's Mistral is a Llama.)"""
POSITIONS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}


class LlamaConfig(Config, frozen=True, kw_only=True):
    architectures: tuple[str, ...] = ()
    vocab_size: settings.Rows
    hidden_size: settings.Width
    intermediate_size: settings.InnerWidth
    num_hidden_layers: settings.Layers
    num_attention_heads: settings.Width
    max_position_embeddings: settings.RotaryPositions | None = None
    """None: as in transformers, `POSITIONS`."""
    num_key_value_heads: settings.Width | None = None
    """None: as many as of queries."""
    head_dim: settings.Width | None = None
    """None: the heads share the width."""
    hidden_act: settings.ActivationName = "silu"
    rms_norm_eps: Annotated[float, Meta(gt=0, le=1)] = 1e-6
    rope_theta: Annotated[float, Meta(gt=1)] = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    """The two keys before in one, as transformers 5 writes them."""
    tie_word_embeddings: bool = False
    sliding_window: Annotated[int, Meta(ge=0)] | None = 4096
    """null or 0: none. Only Mistral has it by itself, Qwen with `use_sliding_window`."""
    use_sliding_window: bool = False
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] = ()
    """Implied by the window."""

    def architecture(self, path: Path) -> Architecture:
        head_size = self.head_dim or self.hidden_size // self.num_attention_heads
        positions = self.max_position_embeddings or POSITIONS[self.model_type]
        scaling = {"rope_theta": self.rope_theta} | (self.rope_scaling or self.rope_parameters or {})
        has_window = self.model_type == "mistral" or self.use_sliding_window
        window = (has_window and self.sliding_window) or positions
        return Architecture(
            family="llama",
            num_layers=self.num_hidden_layers,
            width=self.hidden_size,
            num_heads=self.num_attention_heads,
            # Within its window a model with one is the same as one without.
            max_positions=min(positions, window, MAX_POSITIONS),
            is_windowed=window < positions,
            vocab_size=self.vocab_size,
            padded_vocab_size=self.vocab_size,
            inner_width=self.intermediate_size,
            activation=settings.ACTIVATIONS[self.hidden_act],
            layer_norm_epsilon=self.rms_norm_eps,
            tied_embeddings=self.tie_word_embeddings,
            biases=False,
            eos_ids=self.eos_ids,
            kv_heads=self.num_key_value_heads,
            head_width=head_size,
            rotary=rotary(path, head_size, scaling, positions),
            is_gated=True,
            **KINDS[self.model_type],
        )


def _layer_shapes(arch: Architecture) -> Shapes:
    width, inner, size = arch.width, arch.inner_width, arch.head_size
    queries, keys = arch.num_heads * size, arch.num_kv_heads * size
    qkv: Shapes = {"attn.q": (queries, width), "attn.k": (keys, width), "attn.v": (keys, width)}
    return {
        "ln_1.weight": (width,),
        **with_biases(qkv, arch.qkv_biases),
        **({"attn.q_norm.weight": (size,), "attn.k_norm.weight": (size,)} if arch.qk_norms else {}),
        "attn.o.weight": (width, queries),
        "ln_2.weight": (width,),
        "mlp.gate.weight": (inner, width),
        "mlp.up.weight": (inner, width),
        "mlp.down.weight": (width, inner),
    }


FAMILY = ModelFamily(
    model_types=tuple(KINDS),
    module="ppserve.model.llama",
    config=LlamaConfig,
    only={
        **dict.fromkeys(("mlp_bias", "attention_bias", "rope_interleaved"), False),
        **dict.fromkeys(("attention.causal", "is_causal"), True),
        **dict.fromkeys(("partial_rotary_factor", "rotary_pct", "rope.scale_linear"), 1),
        **dict.fromkeys(("residual_multiplier", "embedding_multiplier", "logits_scaling"), 1),
    },
    gguf_keys={"attention.layer_norm_rms_epsilon": "rms_norm_eps"},
    has_rms_norms=True,
    layer_shapes=_layer_shapes,
    names={
        "wte": ("embed_tokens", "token_embd"),
        "ln_f": ("norm", "output_norm"),
        "lm_head": ("lm_head", "output"),
        "ln_1": ("input_layernorm", "attn_norm"),
        "attn.q": ("self_attn.q_proj", "attn_q"),
        "attn.k": ("self_attn.k_proj", "attn_k"),
        "attn.v": ("self_attn.v_proj", "attn_v"),
        "attn.o": ("self_attn.o_proj", "attn_output"),
        "attn.q_norm": ("self_attn.q_norm", "attn_q_norm"),
        "attn.k_norm": ("self_attn.k_norm", "attn_k_norm"),
        "ln_2": ("post_attention_layernorm", "ffn_norm"),
        "mlp.gate": ("mlp.gate_proj", "ffn_gate"),
        "mlp.up": ("mlp.up_proj", "ffn_up"),
        "mlp.down": ("mlp.down_proj", "ffn_down"),
    },
    layers="model.layers.",
    # What is computed anew.
    ignored=r".*rotary_emb\.inv_freq|rope_freqs\.weight",
)
