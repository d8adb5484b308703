"""GPT-2 in checkpoints: the names of its tensors, and the keys of config.json.

Everything that the reference code (transformers, models/gpt2) computes with is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from ppserve.core.architecture import Architecture
from ppserve.model.checkpoint import Shapes, settings, with_biases
from ppserve.model.checkpoint.family import Config, ModelFamily

MODEL_CLASS = (
    r"^(TF|Flax)?GPT2(LMHeadModel|LMHead|Model|DoubleHeadsModel|PreTrainedModel"
    r"|ForSequenceClassification|ForTokenClassification|ForQuestionAnswering)\Z"
)


class GPT2Config(Config, frozen=True, kw_only=True):
    """Absent keys have GPT-2 small's values, as in transformers."""

    model_type: str = "gpt2"
    architectures: tuple[Annotated[str, Meta(pattern=MODEL_CLASS)], ...] = ()
    vocab_size: settings.Rows = 50257
    n_positions: settings.Positions | None = None
    n_ctx: settings.Positions = 1024
    """What very old files have instead."""
    n_embd: settings.Width = 768
    n_layer: settings.Layers = 12
    n_head: settings.Width = 12
    n_inner: settings.InnerWidth | None = None
    activation_function: settings.ActivationName = "gelu_new"
    layer_norm_epsilon: Annotated[float, Meta(gt=0, le=1)] = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    # It moves the scale and the precision of scores, which are always computed in float32 here.
    reorder_and_upcast_attn: bool = False
    tie_word_embeddings: bool = True
    eos_token_id: settings.EndOfText = settings.END_OF_TEXT

    def architecture(self, path: Path) -> Architecture:
        return Architecture(
            num_layers=self.n_layer,
            width=self.n_embd,
            num_heads=self.n_head,
            max_positions=self.n_positions or self.n_ctx,
            vocab_size=self.vocab_size,
            padded_vocab_size=self.vocab_size,
            inner_width=self.n_inner or 4 * self.n_embd,
            activation=settings.ACTIVATIONS[self.activation_function],
            layer_norm_epsilon=self.layer_norm_epsilon,
            scale_attn_weights=self.scale_attn_weights,
            scale_attn_by_inverse_layer_idx=self.scale_attn_by_inverse_layer_idx,
            tied_embeddings=self.tie_word_embeddings,
            eos_ids=self.eos_ids,
        )


def _layer_shapes(arch: Architecture) -> Shapes:
    width, inner = arch.width, arch.inner_width
    weights = {
        "ln_1": (width,),
        "attn.c_attn": (3 * width, width),
        "attn.c_proj": (width, width),
        "ln_2": (width,),
        "mlp.c_fc": (inner, width),
        "mlp.c_proj": (width, inner),
    }
    return with_biases(weights, arch.biases)


FAMILY = ModelFamily(
    model_types=("gpt2",),
    module="ppserve.model.gpt2",
    config=GPT2Config,
    synonyms={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    },
    only={"position_embedding_type": "absolute", "attention_bias": True, "use_bias": True, "bias": True},
    gguf_keys={"attention.layer_norm_epsilon": "layer_norm_epsilon", "feed_forward_length": "n_inner"},
    layer_shapes=_layer_shapes,
    names={
        "wte": ("wte", "token_embd"),
        "wpe": ("wpe", "position_embd"),
        "ln_f": ("ln_f", "output_norm"),
        "lm_head": ("lm_head", "output"),
        "ln_1": ("ln_1", "attn_norm"),
        "attn.c_attn": ("attn.c_attn", "attn_qkv"),
        "attn.c_proj": ("attn.c_proj", "attn_output"),
        "ln_2": ("ln_2", "ffn_norm"),
        "mlp.c_fc": ("mlp.c_fc", "ffn_up"),
        "mlp.c_proj": ("mlp.c_proj", "ffn_down"),
    },
    layers="transformer.h.",
    is_in_out=True,
    # Mask buffers, and the heads of other tasks.
    ignored=r"h\.\d+\.attn\.(masked_)?bias|(score|classifier|qa_outputs|multiple_choice_head|v_head)\..+",
)
