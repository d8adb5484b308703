"""GPT-2 in checkpoints: the names of its tensors, and the keys of config.json.

Everything that the reference code (transformers, models/gpt2) computes with is read.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from ppserve.core.architecture import Architecture
from ppserve.core.layers import AttentionSpec, LayerSpec, MLPSpec, NormSpec
from ppserve.model.checkpoint import settings
from ppserve.model.checkpoint.family import Config, ModelFamily

MODEL_CLASS = (
    r"^(TF|Flax)?GPT2(LMHeadModel|LMHead|Model|DoubleHeadsModel|PreTrainedModel"
    r"|ForSequenceClassification|ForTokenClassification|ForQuestionAnswering)\Z"
)


class GPT2Config(Config, frozen=True, kw_only=True):
    """The keys of a GPT-2. Absent ones have the values of GPT-2 small, as in transformers."""

    model_type: str = "gpt2"
    architectures: tuple[Annotated[str, Meta(pattern=MODEL_CLASS)], ...] = ()
    vocab_size: settings.Rows = 50257
    n_positions: settings.Positions | None = None
    n_ctx: settings.Positions = 1024
    """Very old files have this in place of `n_positions`."""
    n_embd: settings.Width = 768
    n_layer: settings.Layers = 12
    n_head: settings.Width = 12
    n_inner: settings.InnerWidth | None = None
    activation_function: settings.ActivationName = "gelu_new"
    layer_norm_epsilon: Annotated[float, Meta(gt=0, le=1)] = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    # It changes where scores are scaled and how precise they are; here they are always computed in float32.
    reorder_and_upcast_attn: bool = False
    tie_word_embeddings: bool = True
    eos_token_id: settings.EndOfText = settings.END_OF_TEXT

    def architecture(self, path: Path, *, have_biases: bool = True) -> Architecture:
        """Return the architecture. have_biases: whether linear layers and layer norms have biases; in nanoGPT they
        may have none."""
        settings.check_heads(path, self.n_embd, self.n_head, "n_head")
        norm = NormSpec(self.layer_norm_epsilon, has_bias=have_biases)
        inner_width = self.n_inner or 4 * self.n_embd
        activation = settings.ACTIVATIONS[self.activation_function]
        mlp = MLPSpec(inner_width, activation, has_biases=have_biases)
        first = LayerSpec(self._attention(0, have_biases=have_biases), mlp, norm)
        layers = [first] * self.n_layer
        if self.scale_attn_by_inverse_layer_idx:
            others = (self._attention(layer, have_biases=have_biases) for layer in range(1, self.n_layer))
            layers[1:] = [replace(first, attention=attention) for attention in others]
        return Architecture(
            layers=tuple(layers),
            width=self.n_embd,
            max_positions=self.n_positions or self.n_ctx,
            vocab_size=self.vocab_size,
            padded_vocab_size=self.vocab_size,
            final_norm=norm,
            family="gpt2",
            model_type="gpt2",
            model_class="GPT2LMHeadModel",
            has_learned_positions=True,
            tied_embeddings=self.tie_word_embeddings,
            eos_ids=self.eos_ids,
            begins_with_end=True,
        )

    def _attention(self, layer: int, *, have_biases: bool) -> AttentionSpec:
        head_size = self.n_embd // self.n_head
        scale = head_size**-0.5 if self.scale_attn_weights else 1.0
        if self.scale_attn_by_inverse_layer_idx:
            scale /= layer + 1
        return AttentionSpec(
            num_heads=self.n_head,
            num_kv_heads=self.n_head,
            head_size=head_size,
            scale=scale,
            has_qkv_biases=have_biases,
            has_output_bias=have_biases,
        )


FAMILY = ModelFamily(
    model_types=("gpt2",),
    config=GPT2Config,
    synonyms={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    },
    only={"position_embedding_type": "absolute", "attention_bias": True, "use_bias": True, "bias": True},
    gguf_keys={"attention.layer_norm_epsilon": "layer_norm_epsilon", "feed_forward_length": "n_inner"},
    names={
        "wte": ("wte", "token_embd"),
        "wpe": ("wpe", "position_embd"),
        "ln_f": ("ln_f", "output_norm"),
        "lm_head": ("lm_head", "output"),
        "ln_1": ("ln_1", "attn_norm"),
        "attn.qkv": ("attn.c_attn", "attn_qkv"),
        "attn.o": ("attn.c_proj", "attn_output"),
        "ln_2": ("ln_2", "ffn_norm"),
        "mlp.up": ("mlp.c_fc", "ffn_up"),
        "mlp.down": ("mlp.c_proj", "ffn_down"),
    },
    layers="transformer.h.",
    is_in_out=True,
    # The buffers of masks, and the heads for other tasks.
    ignored=r"h\.\d+\.attn\.(masked_)?bias|(score|classifier|qa_outputs|multiple_choice_head|v_head)\..+",
)
