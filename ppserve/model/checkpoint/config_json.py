"""config.json of a Hugging Face directory, field by field: read, ignored because harmless, or refused by name.

A key that neither a family's reference code knows nor is harmless is refused: a model that needs it would generate
nonsense. A family's own keys are in its file.
"""

from __future__ import annotations

import re
from dataclasses import replace
from os.path import lexists
from pathlib import Path
from typing import Any

from ppserve.core.architecture import Architecture
from ppserve.errors import CheckpointError
from ppserve.files import checked, read_json, shown
from ppserve.model.checkpoint.families import FAMILIES
from ppserve.model.checkpoint.family import Config, ModelFamily
from ppserve.model.checkpoint.settings import real_vocabulary, settled

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
"""Nothing that a forward pass reads."""

HARMLESS_PATTERN = re.compile(r"_.*|summary_.*|tf_legacy_.*|.*_dropout|.*dropout_prob")
NULLABLE = ("eos_token_id", "sliding_window")
"""Keys where null is a value."""


def read_config(directory: Path) -> Architecture:
    """The architecture that config.json declares. Raises CheckpointError with its field.

    The tokenizer beside it settles how many rows of the embedding are real tokens.
    The weights may overrule `tied_embeddings`.
    """
    path = directory / "config.json"
    overruling = directory / "generation_config.json"
    values = read_json(path, dict[str, Any])
    if lexists(overruling):  # as in transformers' generate
        ends = read_json(overruling, Config).eos_token_id
        values |= {} if ends is None else {"eos_token_id": ends}
    if values.get("model_type") == "qwen3" and values.get("head_dim") is None:
        values["head_dim"] = 128  # transformers' default, and not that of a GGUF
    family = family_of(path, values)
    arch = declared(path, values, family)
    num_rows = arch.padded_vocab_size
    vocab_size, end = real_vocabulary(directory, num_rows, arch.eos_id)
    if values.get("eos_token_id") is not None:  # an end may be a row behind the tokenizer's last token
        vocab_size = max(vocab_size, *(named + 1 for named in arch.eos_ids if named < num_rows), 0)
    # As in vLLM, the tokenizer's own end is one too.
    eos_ids = (*arch.eos_ids, *(() if end is None or end in arch.eos_ids else (end,)))
    heads = family.synonyms.get("num_attention_heads", "num_attention_heads")
    return settled(path, replace(arch, vocab_size=vocab_size, eos_ids=eos_ids), heads)


def family_of(path: Path, values: dict[str, Any], field: str = "model_type") -> ModelFamily:
    """field: what the file calls its `model_type`; old GPT-2s have none. Raises CheckpointError."""
    is_old = not {"architectures", "n_embd", "n_layer"}.isdisjoint(values)
    kind = values.get("model_type") or ("gpt2" if is_old else None)
    for family in FAMILIES.values():
        if kind in family.model_types:
            return family
    served = ", ".join(kind for family in FAMILIES.values() for kind in family.model_types)
    found = "missing" if kind is None else shown(kind)
    raise CheckpointError(path, f"is {found}; served are {served}", field)


def declared(path: Path, values: dict[str, Any], family: ModelFamily) -> Architecture:
    """With all rows of the embedding as the vocabulary. Raises CheckpointError."""
    # null counts as absent, as for transformers.
    given = {name: value for name, value in values.items() if value is not None or name in NULLABLE}
    for name, own in family.synonyms.items():
        if name in given:
            value = given.pop(name)
            if given.setdefault(own, value) != value:
                problem = f"is {shown(value)}, but {own} is {shown(given[own])}"
                raise CheckpointError(path, problem, field=name)
    config = checked(path, given, family.config)
    for name in given.keys() - set(family.config.__struct_fields__):
        _check_other_key(path, name, given[name], family)
    return config.architecture(path)


def _check_other_key(path: Path, name: str, value: object, family: ModelFamily) -> None:
    """A key that is not read may only be harmless, say what is so anyway, or be false or empty."""
    if name in HARMLESS or HARMLESS_PATTERN.fullmatch(name) or value in (None, [], {}, ""):
        return
    if name in family.only and value != family.only[name]:
        problem = f"is {shown(value)}; only {shown(family.only[name])} is served"
        raise CheckpointError(path, problem, field=name)
    if name not in family.only and value is not False:
        problem = "not a key that is served, and it may change what is computed; remove it if it does not"
        raise CheckpointError(path, f"is {shown(value)}: {problem}", field=shown(name))
