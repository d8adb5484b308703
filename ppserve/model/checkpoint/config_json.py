"""config.json of a Hugging Face directory, field by field: read, ignored because harmless, or refused by name.

Everything that the reference code (transformers, models/gpt2) computes with is read. A key that it does not
know, and that we do not know to be harmless, is refused: a model that needs it would load and generate nonsense.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ppserve.core.architecture import Architecture
from ppserve.model.checkpoint.fields import LIMITS, Fields, check_heads, ending_id
from ppserve.model.checkpoint.files import is_file, read_json_object, shown
from ppserve.model.checkpoint.vocabulary import real_vocabulary

ACTIVATIONS = {
    "gelu_new": "gelu_new",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "gelu_python_tanh": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_fast",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
"""Names in config.json to the key in `model.stock.ACTIVATIONS`; several names are one function."""

USED = frozenset(
    """
    model_type architectures vocab_size n_positions max_position_embeddings n_ctx n_embd hidden_size n_layer
    num_hidden_layers n_head num_attention_heads n_inner activation_function layer_norm_epsilon
    scale_attn_weights scale_attn_by_inverse_layer_idx reorder_and_upcast_attn tie_word_embeddings
    eos_token_id bos_token_id
    """.split()  # noqa: SIM905 (a list of words reads better as one)
)

HARMLESS = frozenset(
    """
    attn_pdrop embd_pdrop resid_pdrop initializer_range use_cache gradient_checkpointing output_past
    transformers_version torch_dtype dtype name_or_path torchscript use_bfloat16 return_dict
    return_dict_in_generate output_attentions output_hidden_states output_scores chunk_size_feed_forward
    problem_type finetuning_task id2label label2id num_labels task_specific_params n_special
    predict_special_tokens tokenizer_class prefix pad_token_id sep_token_id cls_token_id mask_token_id
    unk_token_id decoder_start_token_id max_length min_length max_new_tokens min_new_tokens do_sample
    early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p min_p
    epsilon_cutoff eta_cutoff repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    renormalize_logits is_decoder line_by_line author license created_date language languages datasets version
    description tags
    """.split()  # noqa: SIM905 (a list of words reads better as one)
)
"""Training, generation defaults, labels, tokenizers and remarks: nothing that a forward pass reads."""

HARMLESS_PATTERN = re.compile(r"_.*|summary_.*|tf_legacy_.*|.*_dropout|.*dropout_prob")

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "cross_attention_hidden_size": (),
    "pruned_heads": ({}, []),
    "position_embedding_type": ("absolute",),
    "attention_bias": (True,),
    "use_bias": (True,),
    "bias": (True,),
}
"""Keys that may only say what a GPT-2 does anyway; null, false and empty are accepted where sensible."""

MODEL_CLASS = re.compile(
    r"(TF|Flax)?GPT2(LMHeadModel|LMHead|Model|DoubleHeadsModel|PreTrainedModel"
    r"|ForSequenceClassification|ForTokenClassification|ForQuestionAnswering)"
)


def read_config(directory: Path) -> Architecture:
    """The architecture that config.json declares. Raises CheckpointError naming the file and the field.

    `vocab_size` there counts rows of the embedding; how many are real tokens is settled by the tokenizer
    beside it (see `vocabulary`). `tied_embeddings` is what the config says; the weights may overrule it.
    """
    path = directory / "config.json"
    fields = Fields(path, read_json_object(path, limit=16 << 20))
    _check_family(fields)
    _check_keys(fields)
    width = fields.integer("n_embd", "hidden_size", limit=LIMITS["width"], default=768)
    num_rows = fields.integer("vocab_size", limit=LIMITS["vocabulary"], default=50257)
    eos_id, bos_id = _special_ids(directory, fields)
    vocab_size = real_vocabulary(directory, num_rows, eos_id)
    arch = Architecture(
        num_layers=fields.integer("n_layer", "num_hidden_layers", limit=LIMITS["layers"], default=12),
        width=width,
        num_heads=fields.integer("n_head", "num_attention_heads", limit=width, default=12),
        max_positions=_positions(fields),
        vocab_size=vocab_size,
        padded_vocab_size=num_rows,
        inner_width=fields.integer("n_inner", limit=LIMITS["inner width"], default=4 * width),
        activation=_activation(fields),
        layer_norm_epsilon=fields.positive("layer_norm_epsilon", default=1e-5),
        scale_attn_weights=fields.boolean("scale_attn_weights", default=True),
        scale_attn_by_inverse_layer_idx=fields.boolean("scale_attn_by_inverse_layer_idx", default=False),
        tied_embeddings=fields.boolean("tie_word_embeddings", default=True),
        eos_id=ending_id(eos_id, vocab_size),
        bos_id=ending_id(bos_id, vocab_size),
    )
    # It only moves the scale and the precision of the scores, which are always computed in float32 here.
    fields.boolean("reorder_and_upcast_attn", default=False)
    check_heads(arch, fields, "n_head")
    _check_synonyms(fields, arch)
    return arch


def _check_family(fields: Fields) -> None:
    values = fields.values
    model_type = values.get("model_type")
    if model_type is None and not {"n_embd", "n_layer", "architectures"} & values.keys():
        raise fields.error("model_type", "is missing; only gpt2 is served")
    if model_type not in (None, "gpt2"):
        raise fields.error("model_type", f"is {shown(model_type)}; only gpt2 is served")
    classes = values.get("architectures") or []
    if not isinstance(classes, list):
        raise fields.error("architectures", f"is {shown(classes)}, not a list")
    for name in classes:
        if not (isinstance(name, str) and MODEL_CLASS.fullmatch(name)):
            raise fields.error("architectures", f"names {shown(name)}, which is not a GPT-2 of transformers")


def _check_keys(fields: Fields) -> None:
    for name, value in fields.values.items():
        if name in USED or name in HARMLESS or name in SYNONYMS or HARMLESS_PATTERN.fullmatch(name):
            continue
        if value is None or value in NEUTRAL.get(name, (False, [], {}, "")):
            continue
        if name in NEUTRAL:
            raise fields.error(name, f"is {shown(value)}: a model computed that way is not served")
        raise fields.error(
            name, f"is {shown(value)}: an unknown key that may change what is computed; remove it if it does not"
        )


SYNONYMS: dict[str, Callable[[Architecture], object]] = {
    "hidden_act": lambda arch: arch.activation,
    "intermediate_size": lambda arch: arch.inner_width,
    "layer_norm_eps": lambda arch: arch.layer_norm_epsilon,
    "head_dim": lambda arch: arch.head_size,
    "num_key_value_heads": lambda arch: arch.num_heads,
}
"""Names that other families use and transformers' GPT-2 does not read: accepted while they agree."""


def _check_synonyms(fields: Fields, arch: Architecture) -> None:
    for name, resolved in SYNONYMS.items():
        value = fields.values.get(name)
        if value is not None and value != resolved(arch):
            raise fields.error(name, f"is {shown(value)}, but the fields that GPT-2 reads say {resolved(arch)}")


def _positions(fields: Fields) -> int:
    """n_positions sizes the embedding; n_ctx is what very old files have instead."""
    names = ["n_positions", "max_position_embeddings"]
    if fields.given(*names) is None:
        names = ["n_ctx"]
    return fields.integer(*names, limit=LIMITS["positions"], default=1024)


def _activation(fields: Fields) -> str:
    _, name = fields.given("activation_function") or ("", "gelu_new")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise fields.error("activation_function", f"is {shown(name)}, not one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _special_ids(directory: Path, fields: Fields) -> tuple[int, int]:
    """eos and bos; -1 for none. generation_config.json overrules, as it does in transformers' generate."""
    sources = [fields]
    generation = directory / "generation_config.json"
    if is_file(generation):
        sources.insert(0, Fields(generation, read_json_object(generation, limit=16 << 20)))
    return _special_id(sources, "eos_token_id"), _special_id(sources, "bos_token_id")


def _special_id(sources: list[Fields], name: str) -> int:
    for fields in sources:
        given = fields.given(name)
        if given is None:
            continue
        value = given[1]
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, bool) or not isinstance(first, int):
            raise fields.error(name, f"is {shown(value)}, not a token id")
        return first
    return -1 if name in sources[-1].values else 50256
