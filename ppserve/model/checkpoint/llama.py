"""Llama and its relatives in checkpoints: the names of their tensors, and the keys of config.json.

Everything that the reference code (transformers, models/llama, mistral, qwen2, qwen3) computes with is read.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from ppserve.core.architecture import MAX_POSITIONS, Architecture
from ppserve.core.layers import AttentionSpec, LayerSpec, MLPSpec, NormSpec
from ppserve.errors import CheckpointError
from ppserve.model.checkpoint import settings
from ppserve.model.checkpoint.family import Config, ModelFamily
from ppserve.model.checkpoint.rotary import rotary

KINDS = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""The model type as which each `model_type` is served. (In a GGUF, a Mistral is a Llama.)"""
POSITIONS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}


class LlamaConfig(Config, frozen=True, kw_only=True):
    """The keys of a Llama, Mistral, Qwen 2 or Qwen 3."""

    architectures: tuple[str, ...] = ()
    vocab_size: settings.Rows
    hidden_size: settings.Width
    intermediate_size: settings.InnerWidth
    num_hidden_layers: settings.Layers
    num_attention_heads: settings.Width
    max_position_embeddings: settings.RotaryPositions | None = None
    """None: see `POSITIONS`, as in transformers."""
    num_key_value_heads: settings.Width | None = None
    """None: there are as many heads of keys and values as of queries."""
    head_dim: settings.Width | None = None
    """None: the heads divide the width evenly."""
    hidden_act: settings.ActivationName = "silu"
    rms_norm_eps: Annotated[float, Meta(gt=0, le=1)] = 1e-6
    rope_theta: Annotated[float, Meta(gt=1)] = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    """The two keys above in one, as transformers 5 writes them."""
    tie_word_embeddings: bool = False
    sliding_window: Annotated[int, Meta(ge=0)] | None = 4096
    """None or 0: there is no window. A Qwen has one only with `use_sliding_window`."""
    use_sliding_window: bool = False
    max_window_layers: Annotated[int, Meta(ge=0)] = 28
    """So many of a Qwen's first layers have no window."""
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] = ()
    """Which layers have the window. If it is empty, the two keys above decide."""

    def architecture(self, path: Path) -> Architecture:
        head_size = self.head_dim or self.hidden_size // self.num_attention_heads
        positions = self.max_position_embeddings or POSITIONS[self.model_type]
        scaling = {"rope_theta": self.rope_theta} | (self.rope_scaling or self.rope_parameters or {})
        has_window = self.model_type == "mistral" or self.use_sliding_window
        if not head_size:
            settings.check_heads(path, self.hidden_size, self.num_attention_heads, "num_attention_heads")
        # A window as large as the model's positions changes nothing.
        window = self.sliding_window if has_window and 0 < (self.sliding_window or 0) < positions else None
        if window is not None and len(self.layer_types) not in (0, self.num_hidden_layers):
            problem = f"names {len(self.layer_types)} layers, not {self.num_hidden_layers}"
            raise CheckpointError(path, problem, field="layer_types")
        norm = NormSpec(self.rms_norm_eps, is_rms=True)
        attention = AttentionSpec(
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads or self.num_attention_heads,
            head_size=head_size,
            scale=head_size**-0.5,
            rotary=rotary(path, head_size, scaling, positions),
            head_norm=norm if self.model_type == "qwen3" else None,
            has_qkv_biases=self.model_type == "qwen2",
        )
        mlp = MLPSpec(self.intermediate_size, settings.ACTIVATIONS[self.hidden_act], is_gated=True)
        plain = LayerSpec(attention, mlp, norm)
        windowed = plain if window is None else replace(plain, attention=replace(attention, window=window))
        kind = KINDS[self.model_type]
        return Architecture(
            layers=tuple(windowed if self._has_window(i) else plain for i in range(self.num_hidden_layers)),
            width=self.hidden_size,
            max_positions=min(positions, MAX_POSITIONS),
            vocab_size=self.vocab_size,
            padded_vocab_size=self.vocab_size,
            final_norm=norm,
            family="llama",
            model_type=kind,
            model_class=f"{kind.capitalize()}ForCausalLM",
            tied_embeddings=self.tie_word_embeddings,
            eos_ids=self.eos_ids,
        )

    def _has_window(self, layer: int) -> bool:
        """Return whether a layer has the window, in a model that has one."""
        if self.layer_types:
            return self.layer_types[layer] == "sliding_attention"
        return not self.model_type.startswith("qwen") or layer >= self.max_window_layers


FAMILY = ModelFamily(
    model_types=tuple(KINDS),
    config=LlamaConfig,
    only={
        **dict.fromkeys(("mlp_bias", "attention_bias", "rope_interleaved"), False),
        **dict.fromkeys(("attention.causal", "is_causal"), True),
        **dict.fromkeys(("partial_rotary_factor", "rotary_pct", "rope.scale_linear"), 1),
        **dict.fromkeys(("residual_multiplier", "embedding_multiplier", "logits_scaling"), 1),
    },
    gguf_keys={"attention.layer_norm_rms_epsilon": "rms_norm_eps"},
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
    # Tensors that are computed here.
    ignored=r".*rotary_emb\.inv_freq|rope_freqs\.weight",
)
