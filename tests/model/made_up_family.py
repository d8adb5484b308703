"""What would be ppserve/model/checkpoint/brook.py: a made-up family, all of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ppserve.core.architecture import Architecture
from ppserve.core.layers import AttentionSpec, LayerSpec, MLPSpec, NormSpec
from ppserve.model.checkpoint import settings
from ppserve.model.checkpoint.family import Config, ModelFamily
from ppserve.model.checkpoint.rotary import rotary


class BrookConfig(Config, frozen=True, kw_only=True):
    rows: settings.Rows
    width: settings.Width
    depth: settings.Layers
    heads: settings.Width
    num_key_value_heads: settings.Width
    length: settings.Positions
    intermediate_size: settings.InnerWidth
    epsilon: float
    rope_theta: float = 1e4

    def architecture(self, path: Path) -> Architecture:
        norm, size = NormSpec(self.epsilon, is_rms=True), self.width // self.heads
        near, far = (rotary(path, size, {"rope_theta": base}, self.length) for base in (self.rope_theta, 1e6))
        attention = AttentionSpec(self.heads, self.num_key_value_heads, size, size**-0.5, near)
        every = LayerSpec(attention, MLPSpec(self.intermediate_size, "relu"), norm, post_norm=norm)
        second = replace(every, attention=replace(attention, rotary=far, window=7))
        return Architecture(
            layers=((every, second) * self.depth)[: self.depth],
            width=self.width, max_positions=self.length, vocab_size=self.rows, padded_vocab_size=self.rows,
            final_norm=norm, family="brook", model_type="brook", model_class="BrookForCausalLM",
            embedding_multiplier=self.width**0.5, tied_embeddings=False, eos_ids=self.eos_ids,
        )  # fmt: skip


FAMILY = ModelFamily(
    model_types=("brook",),
    config=BrookConfig,
    synonyms={"vocab_size": "rows", "hidden_size": "width", "num_hidden_layers": "depth",
              "num_attention_heads": "heads", "max_position_embeddings": "length"},
    gguf_keys={"attention.layer_norm_rms_epsilon": "epsilon"},
    names={
        "wte": ("spring", "token_embd"), "ln_f": ("last", "output_norm"), "lm_head": ("mouth", "output"),
        "ln_1": ("calm", "attn_norm"), "post_ln_1": ("calmer", "post_attention_norm"),
        "attn.q": ("look.q", "attn_q"), "attn.k": ("look.k", "attn_k"), "attn.v": ("look.v", "attn_v"),
        "attn.o": ("look.o", "attn_output"), "ln_2": ("still", "ffn_norm"),
        "post_ln_2": ("stiller", "post_ffw_norm"), "mlp.up": ("rise", "ffn_up"), "mlp.down": ("fall", "ffn_down"),
    },
    layers="brook.bends.",
)  # fmt: skip
