"""config.json of a Hugging Face directory. Each key is read, ignored because it is harmless, or refused by name.

A family's file has the keys that are read. A key that is neither read nor harmless is refused, because a model
that needs it would generate nonsense; but a value like null, false or 0 says that the model does not need it.
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
from ppserve.model.checkpoint.settings import checked_architecture, real_vocabulary

HARMLESS = frozenset(
    """
    attn_pdrop embd_pdrop resid_pdrop initializer_range use_cache gradient_checkpointing output_past
    transformers_version torch_dtype dtype name_or_path torchscript use_bfloat16 return_dict
    return_dict_in_generate output_attentions output_hidden_states output_scores chunk_size_feed_forward
    problem_type finetuning_task id2label label2id num_labels task_specific_params n_special predict_special_tokens
    tokenizer_class prefix bos_token_id pad_token_id sep_token_id cls_token_id mask_token_id unk_token_id
    decoder_start_token_id max_length min_length max_new_tokens min_new_tokens do_sample early_stopping num_beams
    num_beam_groups diversity_penalty temperature top_k top_p typical_p min_p epsilon_cutoff eta_cutoff
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens renormalize_logits is_decoder
    line_by_line author license created_date language languages datasets version description tags pretraining_tp
    max_window_layers is_llama_config transformers.js_config auto_map attn_implementation attention_implementation
    model_name base_model base_model_name_or_path model_id library_name pipeline_tag framework trust_remote_code
    processor_class padding_side truncation_side additional_special_tokens chat_template model_max_length
    seq_length seq_len max_seq_len max_seq_length max_sequence_length multiple_of ffn_dim_multiplier
    num_logits_to_keep logits_to_keep keys_to_ignore_at_inference xla_device dropout gradient_checkpointing_kwargs
    loss_type loss_function label_smoothing neftune_noise_alpha aux_loss_alpha router_aux_loss_coef
    output_router_logits router_jitter_noise z_loss_coefficient seed fp16 bf16 fp32 cache_implementation
    cache_config compile_config constraints continuous_batching_config disable_compile dola_layers force_words_ids
    guidance_scale is_assistant low_memory max_cache_len max_matching_ngram_size max_time num_assistant_tokens
    num_assistant_tokens_schedule output_logits penalty_alpha prefill_chunk_size prompt_lookup_num_tokens
    sequence_bias speculation_type stop_strings target_lookbehind token_healing top_h use_mtp watermarking_config
    encoder_repetition_penalty
    """.split()  # noqa: SIM905 (a list of words reads better as one)
)
"""Keys that no forward pass reads."""

HARMLESS_PATTERN = re.compile(
    r"_.*|summary_.*|tf_legacy_.*|.*_dropout|.*dropout_prob|unsloth_.*|assistant_.*|(train|training|wandb|mergekit)_.*"
    r"|(bos|eos|pad|unk|sep|cls|mask)_token|(tokenizer|use_flash|flash|init|initializer)_.*|.*_checkpointing"
)
QUANTIZED = {"quantization_config", "quantization", "compression_config", "quant_config", "sparsity_config"}
"""Keys by which other programs say how weights are quantized. MLX has `quantization`."""
SERIOUS = re.compile(
    r".*(expert|softcap|lora|cross_attention|pruned|rope|rotary|scal|multipl|bias|norm|window|alibi|sink|parallel"
    r"|encoder|position|attention|attn|chunk|vision|audio|text_config|head|latent|mamba|conv).*"
)
"""The names of keys that surely change what is computed. No message may advise to remove such a key."""
NULLABLE = ("eos_token_id", "sliding_window")
"""Keys for which null is a value, and not the same as an absent key."""


def read_config(directory: Path) -> Architecture:
    """Return the architecture that config.json declares. Raises CheckpointError, which names the key.

    The tokenizer in the same directory decides how many rows of the embedding are real tokens. Opening the weights
    may change `tied_embeddings`.
    """
    path = directory / "config.json"
    overruling = directory / "generation_config.json"
    values = read_json(path, dict[str, Any])
    if lexists(overruling):  # it overrules config.json, as in transformers' generate
        ends = read_json(overruling, Config).eos_token_id
        values |= {} if ends is None else {"eos_token_id": ends}
    if values.get("model_type") == "qwen3" and values.get("head_dim") is None:
        values["head_dim"] = 128  # the default in transformers; a GGUF has another
    family = family_of(path, values)
    arch = declared(path, values, family)
    num_rows = arch.padded_vocab_size
    vocab_size, end = real_vocabulary(directory, num_rows, arch.eos_id)
    if values.get("eos_token_id") is not None:  # an end of text may come after the tokenizer's last token
        vocab_size = max(vocab_size, *(named + 1 for named in arch.eos_ids if named < num_rows), 0)
    # The tokenizer's own end of text counts too, as in vLLM.
    eos_ids = (*arch.eos_ids, *(() if end is None or end in arch.eos_ids else (end,)))
    heads = family.synonyms.get("num_attention_heads", "num_attention_heads")
    return checked_architecture(path, replace(arch, vocab_size=vocab_size, eos_ids=eos_ids), heads)


def family_of(path: Path, values: dict[str, Any], field: str = "model_type") -> ModelFamily:
    """Return the family to which a model type belongs. Old configs of GPT-2 have no model type. field: the key
    under which the file has it. Raises CheckpointError."""
    is_old = not {"architectures", "n_embd", "n_layer"}.isdisjoint(values)
    kind = values.get("model_type") or ("gpt2" if is_old else None)
    for family in FAMILIES.values():
        if kind in family.model_types:
            return family
    served = ", ".join(kind for family in FAMILIES.values() for kind in family.model_types)
    found = "missing" if kind is None else shown(kind)
    raise CheckpointError(path, f"is {found}; served are {served}", field)


def declared(path: Path, values: dict[str, Any], family: ModelFamily) -> Architecture:
    """Return the declared architecture, in which all rows of the embedding count as the vocabulary. Raises
    CheckpointError."""
    # A null counts as absent, as in transformers.
    given = {name: value for name, value in values.items() if value is not None or name in NULLABLE}
    for name, own in family.synonyms.items():
        if name in given:
            value = given.pop(name)
            if given.setdefault(own, value) != value:
                problem = f"is {shown(value)}, but {own} is {shown(given[own])}"
                raise CheckpointError(path, problem, field=name)
    config = checked(path, given, family.config)
    others = given.keys() - set(family.config.__struct_fields__)
    for name in sorted(others, key=lambda name: (name not in QUANTIZED, name)):
        _check_other_key(path, name, given[name], family)
    return config.architecture(path)


def _check_other_key(path: Path, name: str, value: object, family: ModelFamily) -> None:
    """Check a key that is not read. It must be harmless, have the only value that the family can have, or be
    false, zero or empty. Raises CheckpointError."""
    if name in HARMLESS or HARMLESS_PATTERN.fullmatch(name):
        return
    if name in family.only:
        if value in (None, family.only[name]):
            return
        problem = f"is {shown(value)}; only {shown(family.only[name])} is served"
    elif value in (None, False, [], {}, ""):  # 0 equals False
        return
    elif name in QUANTIZED:
        method = value.get("quant_method") or value.get("format") if isinstance(value, dict) else None
        of = f" by {shown(method)}" if method else " by MLX" if name == "quantization" else ""
        served = "float32, bfloat16 and float16 (--quantization makes int8 or int4 of them), and a GGUF's"
        problem = f"the weights are quantized{of}; served are {served}"
    elif SERIOUS.fullmatch(name):
        problem = f"is {shown(value)}; no model with it is served"
    else:
        advice = "; take it out if it does not" if path.name == "config.json" else ""
        problem = f"is {shown(value)}: an unknown key, which may change what is computed{advice}"
    raise CheckpointError(path, problem, field=shown(name))
