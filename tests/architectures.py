"""Small models' architectures for tests, by a few sizes and what differs from their family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ppserve.core.architecture import Architecture
from ppserve.core.layers import Rotary
from ppserve.model.checkpoint.gpt2 import GPT2Config
from ppserve.model.checkpoint.llama import LlamaConfig

_SHARED = ("tied_embeddings", "eos_ids", "padded_vocab_size", "model_type", "model_class")


def gpt2(
    num_layers: int,
    width: int,
    num_heads: int,
    max_positions: int,
    vocab_size: int,
    padded_vocab_size: int | None = None,
    inner_width: int | None = None,
    *,
    biases: bool = True,
    **changes: Any,
) -> Architecture:
    """A GPT-2; `changes` are fields of Architecture or keys of its config."""
    renamed = {"activation": "activation_function"}
    shared = {"eos_ids": (), "padded_vocab_size": padded_vocab_size or vocab_size}
    shared |= {name: changes.pop(name) for name in _SHARED if name in changes}
    config = GPT2Config(
        n_layer=num_layers, n_embd=width, n_head=num_heads, n_positions=max_positions, vocab_size=vocab_size,
        n_inner=inner_width, **{renamed.get(name, name): value for name, value in changes.items()},
    )  # fmt: skip
    return replace(config.architecture(Path(), have_biases=biases), **shared)


def llama(
    num_layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    head_width: int,
    max_positions: int,
    vocab_size: int,
    inner_width: int,
    *,
    qkv_biases: bool = False,
    qk_norms: bool = False,
    **changes: Any,
) -> Architecture:
    """A Llama, Qwen 2 or Qwen 3; `changes` are fields of Architecture, or of every MLP."""
    config = LlamaConfig(
        model_type="qwen3" if qk_norms else "qwen2" if qkv_biases else "llama", vocab_size=vocab_size,
        hidden_size=width, intermediate_size=inner_width, num_hidden_layers=num_layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_width, max_position_embeddings=max_positions,
        rms_norm_eps=1e-5,
    )  # fmt: skip
    frequencies = tuple(float(np.float32(10000 ** (-2 * i / head_width))) for i in range(head_width // 2))
    attention: dict[str, Any] = {"rotary": Rotary(frequencies), "has_qkv_biases": qkv_biases}
    shared = {name: changes.pop(name) for name in _SHARED if name in changes}
    arch = replace(config.architecture(Path()), **shared)
    return changed(arch, attention=attention, mlp=changes)


def changed(arch: Architecture, **parts: dict[str, Any]) -> Architecture:
    """Return the model with other fields in the parts of every layer, `attention` or `mlp`."""
    return arch.with_layers(
        lambda layer: replace(layer, **{name: replace(getattr(layer, name), **new) for name, new in parts.items()})
    )
