"""Llama and its kin: the names of their tensors in each format, and the keys of config.json.

Everything that the reference code (transformers, models/llama, mistral, qwen2, qwen3) computes with is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from ppserve.core.architecture import Architecture, Rotary
from ppserve.errors import CheckpointError
from ppserve.files import checked, shown
from ppserve.model.checkpoint.settings import (
    ACTIVATIONS,
    ActivationName,
    EndOfText,
    InnerWidth,
    Layers,
    Positions,
    Rows,
    Width,
)

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
"""Without `model.layers.{i}.` in front."""

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
"""Without `blk.{i}.` in front."""

KINDS: dict[str, dict[str, bool]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_biases": True},
    "qwen3": {"qk_norms": True},
}
"""By `model_type`, and by the architecture of a GGUF: what is not a Llama's. (A GGUF's Mistral is a Llama.)"""


COMPUTED = ("rotary_emb.inv_freq", "rope_freqs.weight")
"""Ends of the names of what is computed anew."""


def canonical_names(
    before_layers: str, names: dict[str, str], computed: tuple[str, ...] = ()
) -> Callable[[str], str | None]:
    """From a format's names, of which those of layers begin with `before_layers`, to the canonical ones: unknown
    names stay; None for those that end as in `computed`."""
    pattern = re.compile(rf"({re.escape(before_layers)}(0|[1-9]\d{{0,5}})\.)?(.+)\.(weight|bias)")

    def canonical(stored_name: str) -> str | None:
        match = pattern.fullmatch(stored_name)
        if match is None or match[3] not in names:
            return None if stored_name.endswith(computed) else stored_name
        return f"{f'h.{match[2]}.' if match[1] else ''}{names[match[3]]}.{match[4]}"

    return canonical


class LlamaConfig(msgspec.Struct, frozen=True):
    """The keys of config.json that are read. Those without a default must be given."""

    model_type: str
    vocab_size: Rows
    hidden_size: Width
    intermediate_size: InnerWidth
    num_hidden_layers: Layers
    num_attention_heads: Width
    max_position_embeddings: Positions
    architectures: list[str] = []
    num_key_value_heads: Width | None = None
    """None: as many as of queries."""
    head_dim: Width | None = None
    """None: the heads share the width."""
    hidden_act: ActivationName = "silu"
    rms_norm_eps: Annotated[float, Meta(gt=0, le=1)] = 1e-6
    rope_theta: Annotated[float, Meta(gt=1)] = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    """The two keys before in one, as transformers 5 writes them."""
    tie_word_embeddings: bool = False
    sliding_window: Positions | None = None
    """No row sees further back; only Mistral has it by itself, Qwen with `use_sliding_window`."""
    use_sliding_window: bool = False
    layer_types: list[Literal["full_attention", "sliding_attention"]] = []
    """Implied by the window."""
    eos_token_id: EndOfText = None


ONLY = {"mlp_bias": False, "attention_bias": False, "rope_interleaved": False}
"""Keys that may only say what is so of every one of them."""


def architecture(path: Path, given: dict[str, Any]) -> Architecture:
    """What config.json at `path` says, but for the vocabulary's real size. Raises CheckpointError."""
    config = checked(path, given, LlamaConfig)
    head_size = config.head_dim or config.hidden_size // config.num_attention_heads
    scaling = {"rope_theta": config.rope_theta} | (config.rope_scaling or {}) | (config.rope_parameters or {})
    has_window = config.sliding_window and (config.model_type == "mistral" or config.use_sliding_window)
    window = config.sliding_window if has_window else config.max_position_embeddings
    return Architecture(
        num_layers=config.num_hidden_layers,
        width=config.hidden_size,
        num_heads=config.num_attention_heads,
        # Within its window a model with one is the same as one without.
        max_positions=min(config.max_position_embeddings, window or config.max_position_embeddings),
        vocab_size=config.vocab_size,
        padded_vocab_size=config.vocab_size,
        inner_width=config.intermediate_size,
        activation=ACTIVATIONS[config.hidden_act],
        layer_norm_epsilon=config.rms_norm_eps,
        tied_embeddings=config.tie_word_embeddings,
        rotary=rotary(path, head_size, scaling, config.max_position_embeddings),
        kv_heads=config.num_key_value_heads,
        head_width=head_size,
        **common(config.model_type),
    )


def common(kind: str) -> dict[str, Any]:
    """What all models of a kind have in common, as fields of `Architecture`."""
    return {"family": "llama", "biases": False, "is_gated": True, **KINDS[kind]}


def rotary(path: Path, head_size: int, scaling: dict[str, Any], max_positions: int) -> Rotary:
    """scaling: `rope_theta` and the parameters of its `rope_type`, by transformers' names. Raises CheckpointError
    for a type that is not served, or a parameter that is missing."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in SCALINGS:
        problem = f"is {shown(kind)}; served are {', '.join(SCALINGS)}"
        raise CheckpointError(path, problem, field="rope_scaling.rope_type")
    if unknown := scaling.keys() - KNOWN:
        raise CheckpointError(path, "is not a parameter that is served", field=f"rope_scaling.{min(unknown)}")
    if head_size % 2:
        raise CheckpointError(path, f"is {head_size}: rotary positions turn pairs of features", field="head_dim")
    try:
        exponents = np.arange(0, head_size, 2) / head_size
        frequencies = float(scaling["rope_theta"]) ** -exponents
        scaled, magnitude = SCALINGS[kind](frequencies, {"max_positions": max_positions} | scaling)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise CheckpointError(path, f"{kind} positions need a number for {error}", field="rope_scaling") from error
    return Rotary(tuple(float(number) for number in scaled.astype(np.float32)), float(np.float32(magnitude)))


KNOWN = frozenset(
    """rope_theta rope_type type factor low_freq_factor high_freq_factor original_max_position_embeddings
    attention_factor beta_fast beta_slow mscale mscale_all_dim truncate""".split()  # noqa: SIM905
)

Frequencies = np.ndarray[Any, np.dtype[np.float64]]
Scaled = tuple[Frequencies, float]


def _default(frequencies: Frequencies, of: dict[str, Any]) -> Scaled:
    return frequencies, 1.0


def _linear(frequencies: Frequencies, of: dict[str, Any]) -> Scaled:
    return frequencies / float(of["factor"]), 1.0


def _llama3(frequencies: Frequencies, of: dict[str, Any]) -> Scaled:
    """Long waves are stretched, short ones stay, those between in proportion."""
    factor, low, high = (float(of[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = float(of["original_max_position_embeddings"]) * frequencies / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (kept + (1 - kept) / factor), 1.0


def _yarn(frequencies: Frequencies, of: dict[str, Any]) -> Scaled:
    """As _llama3, in proportion to the feature's number; queries and keys grow as well. (arXiv 2309.00071)"""
    factor, base = float(of["factor"]), float(of["rope_theta"])
    original = float(of.get("original_max_position_embeddings") or of["max_positions"])
    count = len(frequencies)

    def feature(num_turns: float) -> float:
        return count * math.log(original / (num_turns * 2 * math.pi)) / math.log(base)

    low = feature(float(of.get("beta_fast") or 32))
    high = feature(float(of.get("beta_slow") or 1))
    if of.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * count - 1)
    stretched = np.clip((np.arange(count) - low) / max(high - low, 0.001), 0, 1)
    scaled = frequencies * (1 - stretched + stretched / factor)
    if of.get("attention_factor") is not None:
        return scaled, float(of["attention_factor"])
    if of.get("mscale") and of.get("mscale_all_dim"):
        return scaled, _growth(factor, float(of["mscale"])) / _growth(factor, float(of["mscale_all_dim"]))
    return scaled, _growth(factor, 1.0)


def _growth(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1


SCALINGS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
