"""config.json of a Hugging Face directory, field by field: read, ignored because harmless, or refused by name.

Everything that the reference code (transformers, models/gpt2) computes with is read. A key that it does not
know, and that we do not know to be harmless, is refused: a model that needs it would load and generate nonsense.
Here are a GPT-2's keys, and what all families have in common; `llama` has its own.
"""

from __future__ import annotations

import re
from dataclasses import replace
from os.path import lexists
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ppserve.core.architecture import Architecture
from ppserve.errors import CheckpointError
from ppserve.files import checked, read_json, shown
from ppserve.model.checkpoint import llama
from ppserve.model.checkpoint.settings import (
    ACTIVATIONS,
    END_OF_TEXT,
    ActivationName,
    EndOfText,
    InnerWidth,
    Layers,
    Positions,
    Rows,
    Width,
    real_vocabulary,
    settled,
)


class Config(msgspec.Struct, frozen=True):
    """The keys that are read. Absent ones have GPT-2 small's values, as in transformers."""

    model_type: str = "gpt2"
    architectures: list[str] = []
    vocab_size: Rows = 50257
    n_positions: Positions = 1024
    n_embd: Width = 768
    n_layer: Layers = 12
    n_head: Width = 12
    n_inner: InnerWidth | None = None
    activation_function: ActivationName = "gelu_new"
    layer_norm_epsilon: Annotated[float, Meta(gt=0, le=1)] = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    # It only moves the scale and the precision of the scores, which are always computed in float32 here.
    reorder_and_upcast_attn: bool = False
    tie_word_embeddings: bool = True
    eos_token_id: EndOfText = END_OF_TEXT


class EndOfTexts(msgspec.Struct, frozen=True):
    """What is read of generation_config.json."""

    eos_token_id: EndOfText = None


SYNONYMS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
"""Generic names of what transformers' GPT-2 reads, and its own."""

HARMLESS = frozenset(
    """
    attn_pdrop embd_pdrop resid_pdrop initializer_range use_cache gradient_checkpointing output_past
    transformers_version torch_dtype dtype name_or_path torchscript use_bfloat16 return_dict
    return_dict_in_generate output_attentions output_hidden_states output_scores chunk_size_feed_forward
    problem_type finetuning_task id2label label2id num_labels task_specific_params n_special
    predict_special_tokens tokenizer_class prefix bos_token_id pad_token_id sep_token_id cls_token_id mask_token_id
    unk_token_id decoder_start_token_id max_length min_length max_new_tokens min_new_tokens do_sample
    early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p min_p
    epsilon_cutoff eta_cutoff repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    renormalize_logits is_decoder line_by_line author license created_date language languages datasets version
    description tags pretraining_tp max_window_layers is_llama_config transformers.js_config
    """.split()  # noqa: SIM905 (a list of words reads better as one)
)
"""Training, generation defaults, labels, tokenizers and remarks: nothing that a forward pass reads."""

HARMLESS_PATTERN = re.compile(r"_.*|summary_.*|tf_legacy_.*|.*_dropout|.*dropout_prob")

ONLY = {"position_embedding_type": "absolute", "attention_bias": True, "use_bias": True, "bias": True}
"""Keys that may only say what is so of every GPT-2."""

MODEL_CLASS = re.compile(
    r"(TF|Flax)?GPT2(LMHeadModel|LMHead|Model|DoubleHeadsModel|PreTrainedModel"
    r"|ForSequenceClassification|ForTokenClassification|ForQuestionAnswering)"
)

_MAX_BYTES = 16 << 20


def read_config(directory: Path) -> Architecture:
    """The architecture that config.json declares. Raises CheckpointError naming the file and the field.

    `vocab_size` there counts rows of the embedding; how many are real tokens is settled by the tokenizer
    beside it. `tied_embeddings` is what the config says; the weights may overrule it.
    """
    path = directory / "config.json"
    values = read_json(path, dict[str, Any], limit=_MAX_BYTES)
    if values.get("model_type") in llama.KINDS:
        arch, heads = _read_llama(path, values), "num_attention_heads"
    else:
        arch, heads = _read_gpt2(path, values), "n_head"
    ends = _ends_of_text(path, values.get("eos_token_id", END_OF_TEXT if arch.family == "gpt2" else None))
    vocab_size = real_vocabulary(directory, arch.padded_vocab_size, ends[0] if ends else None)
    return settled(path, replace(arch, vocab_size=vocab_size, eos_ids=ends), heads)


def _read_llama(path: Path, values: dict[str, Any]) -> Architecture:
    given = {name: value for name, value in values.items() if value is not None}
    _check_other_keys(path, given, llama.LlamaConfig, llama.ONLY)
    return llama.architecture(path, given)


def _read_gpt2(path: Path, values: dict[str, Any]) -> Architecture:
    given = _given(path, values)
    config = _config(path, given)
    _check_other_keys(path, given, Config, ONLY)
    return Architecture(
        num_layers=config.n_layer,
        width=config.n_embd,
        num_heads=config.n_head,
        max_positions=config.n_positions,
        vocab_size=config.vocab_size,
        padded_vocab_size=config.vocab_size,
        inner_width=config.n_inner or 4 * config.n_embd,
        activation=ACTIVATIONS[config.activation_function],
        layer_norm_epsilon=config.layer_norm_epsilon,
        scale_attn_weights=config.scale_attn_weights,
        scale_attn_by_inverse_layer_idx=config.scale_attn_by_inverse_layer_idx,
        tied_embeddings=config.tie_word_embeddings,
    )


def _given(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """What is set, under GPT-2's own names. null counts as absent, as it does for transformers, but for an id."""
    given = {name: value for name, value in values.items() if value is not None or name == "eos_token_id"}
    for name, own in SYNONYMS.items():
        if name in given:
            value = given.pop(name)
            if given.setdefault(own, value) != value:
                raise CheckpointError(path, f"is {shown(value)}, but {own} is {shown(given[own])}", field=name)
    if "n_ctx" in given:  # what very old files have instead
        given.setdefault("n_positions", given.pop("n_ctx"))
    return given


def _config(path: Path, given: dict[str, Any]) -> Config:
    """Raises CheckpointError for a model of another family as well."""
    served = f"served are gpt2, {', '.join(llama.KINDS)}"
    if not {"model_type", "architectures", "n_embd", "n_layer"} & given.keys():
        raise CheckpointError(path, f"is missing; {served}", field="model_type")
    if given.get("model_type", "gpt2") != "gpt2":
        raise CheckpointError(path, f"is {shown(given['model_type'])}; {served}", field="model_type")
    config = checked(path, given, Config)
    for name in config.architectures:
        if not MODEL_CLASS.fullmatch(name):
            problem = f"names {shown(name)}, which is not a GPT-2 of transformers"
            raise CheckpointError(path, problem, field="architectures")
    return config


def _check_other_keys(
    path: Path, given: dict[str, Any], config: type[msgspec.Struct], only: dict[str, Any]
) -> None:
    """Keys that are not read may only be harmless, say what is so anyway, or be false or empty."""
    for name, value in given.items():
        is_harmless = name in HARMLESS or HARMLESS_PATTERN.fullmatch(name) or value in ([], {}, "")
        if is_harmless or name in config.__struct_fields__:
            continue
        if name in only and value != only[name]:
            raise CheckpointError(path, f"is {shown(value)}; only {shown(only[name])} is served", field=name)
        if name not in only and value is not False:
            problem = "not a key that is served, and it may change what is computed; remove it if it does not"
            raise CheckpointError(path, f"is {shown(value)}: {problem}", field=shown(name))


def _ends_of_text(config_file: Path, ids: Any) -> tuple[int, ...]:
    """generation_config.json overrules, as it does in transformers' generate."""
    ends = checked(config_file, {"eos_token_id": ids}, EndOfTexts).eos_token_id
    path = config_file.with_name("generation_config.json")
    if lexists(path):
        overruling = read_json(path, EndOfTexts, limit=_MAX_BYTES).eos_token_id
        ends = ends if overruling is None else overruling
    return () if ends is None else tuple(ends) if isinstance(ends, list) else (ends,)
